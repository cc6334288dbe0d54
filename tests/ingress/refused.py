"""Checks of all refusals: OpenAI's envelope, without internals of the server."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import strategies as st

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
INSIDES = ("Traceback", "0x", "/srv", "/home", "site-packages")
# Any JSON, to use in place of the expected value.
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcrole", max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def error_of(answer: httpx.Response, status: int = 400, asked: str = "") -> dict[str, Any]:
    """The error of an answer. It may contain no internals except those that ``asked`` contains."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (key,) = answer.json()
    error: dict[str, Any] = answer.json()[key]
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 700
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] is None or len(error["param"]) <= 120
    assert not [inside for inside in INSIDES if inside in error["message"] and inside not in asked]
    return error

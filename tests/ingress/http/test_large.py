"""Large inputs are counted before they are parsed, and large answers in pieces equal answers in one piece."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.frontend.threads import LARGE
from raylm.ingress.http import body as json_body
from raylm.ingress.http.answer import Pieces, json_answer
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT
from tests.ingress.refused import JSON, error_of

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet='a,:{}[]"\\\n漢', max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\,', max_size=4), inner, max_size=5),
)


def elements(value: Any) -> int:
    """The number of commas, colons and opening brackets around the parts of ``value`` in JSON."""
    if isinstance(value, dict):
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(elements, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(elements, value))
    return 0


@given(values)
def test_elements_are_counted_outside_of_strings(value: Any) -> None:
    assert json_body._count_elements(orjson.dumps(value)) == elements(value)
    assert json_body._count_marks(orjson.dumps(value)) >= elements(value)


@given(st.binary(max_size=40))
def test_any_bytes_can_be_counted(body: bytes) -> None:
    assert 0 <= json_body._count_elements(body) <= json_body._count_marks(body) <= len(body)
    assert json_body._count_elements(b'{"a":"' + body) >= 2, "the first brace and colon are outside of strings"


async def test_too_many_values_are_refused_before_they_are_parsed(client: httpx.AsyncClient) -> None:
    many = b'{"model":"org/fake-model","prompt":[' + b"5," * json_body.MAX_ELEMENTS + b"5]}"
    answer = await client.post("/v1/completions", content=many, headers=JSON)
    assert "JSON values" in error_of(answer, 413)["message"]


async def test_marks_in_strings_are_no_values(client: httpx.AsyncClient) -> None:
    body = TEXT | {"prompt": '[{"a":1},\\' * 100_000}
    assert (await client.post("/v1/completions", json=body)).json()["error"]["code"] == "context_length_exceeded"


with_pieces = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4).map(Pieces)
        | st.lists(scalars, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
)


def plain(value: Any) -> Any:
    """``value`` with lists in place of Pieces. Pieces are not consumed."""
    if isinstance(value, Pieces):
        value.values = list(value.values)
        return [plain(item) for item in value.values]
    return {name: plain(item) for name, item in value.items()} if isinstance(value, dict) else value


@given(with_pieces)
async def test_an_answer_in_pieces_says_the_same(value: Any) -> None:
    wanted = plain(value)
    for size in (0, LARGE + 1):
        assert orjson.loads(b"".join(await json_answer(lambda: value, size))) == wanted


async def test_a_large_answer_is_written_elsewhere_and_in_several_pieces() -> None:
    threads = set()

    def make() -> Any:
        threads.add(threading.get_ident())
        return {"data": Pieces("x" * 1000 for _ in range(5000))}

    pieces = await json_answer(make, 5000)
    assert len(pieces) > 3
    assert threads.isdisjoint({threading.get_ident()})
    assert len(orjson.loads(b"".join(pieces))["data"]) == 5000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_answer_of_logprobs_is_whole(client: httpx.AsyncClient, llm: FakeAsyncLLM, stream: bool) -> None:
    llm.reply, llm.step = "a" * 700, 300
    for path, base, fields in (
        ("/v1/chat/completions", CHAT, {"logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", TEXT, {"logprobs": 20, "max_tokens": 2000}),
    ):
        answer = await client.post(path, json=base | fields | {"stream": stream, "n": 2})
        assert answer.status_code == 200
        lines = answer.text.split("\n\n")[:-2] if stream else [answer.text]
        found = [orjson.loads(line.rpartition("data: ")[2]) for line in lines]
        shown = [c["logprobs"] for chunk in found for c in chunk["choices"] if c["logprobs"]]
        tokens = sum(len(entry.get("content") or entry.get("tokens")) for entry in shown)
        assert tokens == (701 + 702)


async def test_many_messages_and_parts_are_taken(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    parts = [{"type": "text", "text": "a"}] * 1200
    messages = [{"role": "user", "content": parts}] + [{"role": "user", "content": "b"}] * 1200
    llm.max_model_len = 100_000
    assert (await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})).status_code == 200
    assert len(llm.rendered[0].messages) == 1201
    messages[-1] = {"role": "user", "content": 5}  # type: ignore[dict-item]
    error = error_of(await client.post("/v1/chat/completions", json=CHAT | {"messages": messages}))
    assert error["param"] == "messages[1200].content"

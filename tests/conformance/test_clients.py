"""The client libraries of clients.py against the embedded model."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from tests.conformance.clients import CHECKS

INSTALLED = [check for library in ("openai", "anthropic", "langchain_openai") for check in CHECKS[library]]


@pytest.mark.parametrize("check", INSTALLED, ids=lambda check: check.__name__)
def test_client(url: str, check: Callable[[str], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of libraries are not our errors
        check(url)

"""Fixtures of the HTTP tests: the app with a fake AsyncLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.ingress import build_asgi_app
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import client_of


@pytest.fixture
def llm() -> FakeAsyncLLM:
    return FakeAsyncLLM()


@pytest.fixture
def app(llm: FakeAsyncLLM) -> Starlette:
    return build_asgi_app(llm, Config())  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as found:
        yield found

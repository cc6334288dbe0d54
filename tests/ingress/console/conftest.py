"""Fixtures: a stack with one engine, and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.ingress.console.stack import Stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as stack:
        yield stack


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.client() as client:
        yield client

"""One running server, and honest streams that must continue whatever a test sends to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import httpx
import pytest
import pytest_asyncio

from tests.serving import ARGS, Server, chat, free_port, serve_file, text_of

T = TypeVar("T")
Beside = Callable[[Awaitable[T]], Awaitable[T]]

QUESTIONS = [f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (90, 4), (33, 44), (5, 60), (18, 2), (71, 9), (6, 6))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a module, so that later tests notice effects of earlier ones."""
    port = free_port()
    with Server(serve_file(tmp_path_factory.mktemp("serve") / "serve.yaml", port, ARGS), port) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        yield client


async def stream_text(client: httpx.AsyncClient, question: str) -> str:
    """The whole text of a stream, which must not be cut."""
    body = chat(question, stream=True, max_tokens=120, ignore_eos=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in lines
    assert not any('"error"' in line for line in lines)
    return "".join(map(text_of, lines))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(client: httpx.AsyncClient) -> dict[str, str]:
    """The text of each honest stream without hostile requests."""
    return {question: await stream_text(client, question) for question in QUESTIONS}


def actors(server: Server) -> dict[str, list[int]]:
    """The processes that must not die."""
    return {name: sorted(server.processes(name)) for name in ("ServeReplica", "EngineCore", "Worker")}


@pytest_asyncio.fixture(loop_scope="session")
async def beside(server: Server, client: httpx.AsyncClient, alone: dict[str, str]) -> Beside[T]:
    """Run hostile requests beside eight streams. The texts must be the same, and the processes too."""

    async def run(hostile: Awaitable[T]) -> T:
        before, over = actors(server), asyncio.Event()

        async def go_on(question: str) -> None:
            while True:
                assert await stream_text(client, question) == alone[question]
                if over.is_set():
                    return

        honest = [asyncio.create_task(go_on(question)) for question in QUESTIONS]
        await asyncio.sleep(0)
        try:
            return await hostile
        finally:
            over.set()
            await asyncio.gather(*honest)
            assert all(before.values())
            assert actors(server) == before

    return run

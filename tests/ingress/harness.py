"""Clients for the app, in this process or over a real server, and readers of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp


def client_of(app: Starlette) -> httpx.AsyncClient:
    """A client that calls the app in this process and reads whole answers."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@asynccontextmanager
async def served(app: ASGIApp, *, websockets: bool = False) -> AsyncIterator[str]:
    """Serve the app with uvicorn on a free port. Yields its base URL. Idle connections stay open for an hour."""
    ws: Literal["websockets-sansio", "none"] = "websockets-sansio" if websockets else "none"
    config = uvicorn.Config(app, port=0, log_level="error", ws=ws, lifespan="off", timeout_keep_alive=3600)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def events(text: str) -> list[Any]:
    """The parsed data of each event of a stream. [DONE] stays a string. An event may have an id.

    Comments are skipped.
    """
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        event_id, _, data = block.rpartition("\n")
        assert event_id == "" or (event_id.startswith("id: ") and len(event_id) <= 84)
        assert data.startswith("data: ")
        data = data.removeprefix("data: ")
        found.append(data if data == "[DONE]" else orjson.loads(data))
    return found


def typed_events(text: str) -> list[dict[str, Any]]:
    """The parsed data of each event of a stream with named events. The name must equal the type in the data.

    An event may have an id.
    """
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *event_id, name, data = block.split("\n")
        assert len(event_id) < 2
        assert all(line.startswith("id: ") for line in event_id)
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


class Deadlines:
    """Time limits of clients that wait for an hour. The test ends them early."""

    S = 3600.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later
        self.timers: list[asyncio.TimerHandle] = []

        def noting(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            timer = call_later(delay, *args, **options)
            if delay == self.S:
                self.timers.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_later", noting)

    def run_out(self) -> None:
        """End all open time limits."""
        for timer in self.timers:
            if not timer.cancelled():
                timer._run()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - the condition is any
            await asyncio.sleep(0.005)


CHAT = {"model": "org/fake-model", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "org/fake-model", "prompt": "Say"}

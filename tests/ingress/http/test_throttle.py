"""Throttle: many requests start a few per turn, in order, and other tasks run in between."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import MutableMapping
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from raylm.frontend.admission import PER_TURN, Throttle
from raylm.ingress.http.middleware import ThrottleMiddleware
from tests.ingress.harness import TEXT


async def test_a_crowd_passes_in_order_a_few_in_each_turn() -> None:
    throttle, passed, turns = Throttle(), [], 0

    async def come(place: int) -> None:
        await throttle.enter()
        passed.append((place, turns))

    crowd = [asyncio.create_task(come(place)) for place in range(10 * PER_TURN)]
    while len(passed) < len(crowd):
        before = len(passed)
        await asyncio.sleep(0)
        turns += 1
        assert len(passed) - before <= PER_TURN
    assert [place for place, _ in passed] == list(range(len(crowd)))
    assert turns >= 10


async def test_who_leaves_while_waiting_holds_up_nobody() -> None:
    throttle = Throttle()
    crowd = [asyncio.create_task(throttle.enter()) for _ in range(5 * PER_TURN)]
    await asyncio.sleep(0)
    leaving = crowd[PER_TURN::2]
    for task in leaving:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert [task for task in crowd if task.cancelled()] == leaving
    last = asyncio.create_task(throttle.enter())
    for _ in range(3):
        await asyncio.sleep(0)
    assert last.done()


async def test_alone_nobody_waits() -> None:
    throttle = Throttle()
    for _ in range(PER_TURN):
        with pytest.raises(StopIteration):  # it ran without a pause
            throttle.enter().send(None)


async def test_probes_pass_by_a_crowd_at_the_entrance() -> None:
    entered: list[str] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        entered.append(scope["path"])

    async def come(path: str) -> None:
        await entrance({"type": "http", "path": path}, None, None)  # type: ignore[arg-type]

    entrance = ThrottleMiddleware(inside)
    paths = ["/v1/completions"] * 50 + ["/health", "/-/healthz", "/models/health"]
    crowd = [asyncio.create_task(come(path)) for path in paths]
    await asyncio.sleep(0)
    assert entered == ["/v1/completions"] * PER_TURN + ["/health", "/-/healthz", "/models/health"]
    await asyncio.gather(*crowd)
    assert len(entered) == len(paths)


class Connection:
    """A connection like uvicorn's: it owns the scope and receives the answer."""

    def __init__(self, path: str, body: bytes) -> None:
        headers = [(b"content-type", b"application/json")]
        self.scope: Scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "headers": headers}
        self.scope |= {"query_string": b"", "root_path": ""}
        self.body, self.statuses = body, []

    async def receive(self) -> dict[str, Any]:
        body, self.body = self.body, b""
        if not body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.statuses += [message["status"]] if "status" in message else []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/health", None, 200),
        ("/no/such/route", None, 404),
        ("/v1/completions", None, 405),
        ("/v1/completions", TEXT, 200),
        ("/v1/completions", TEXT | {"stream": True}, 200),
        ("/v1/completions", {}, 400),
    ],
)
async def test_an_answered_request_is_freed_without_the_collector(
    app: Starlette, path: str, body: Any, status: int
) -> None:
    """Reference cycles of many requests accumulate, and collecting them stops the event loop."""
    await asyncio.sleep(0)
    gc.disable()
    try:
        connection = Connection(path, b"" if body is None else orjson.dumps(body))
        await app(connection.scope, connection.receive, connection.send)
        assert connection.statuses == [status]
        gone = weakref.ref(connection)
        del connection
        for _ in range(3):
            await asyncio.sleep(0)  # tasks that watched for its end are freed too
        assert gone() is None
    finally:
        gc.enable()

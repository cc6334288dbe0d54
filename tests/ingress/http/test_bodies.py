"""Bodies that arrive slowly, partly or never: they take no place of other requests, and lose their own in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from starlette.types import Message

from raylm.config import Config
from raylm.errors import BodyTimeoutError, BodyTooLargeError, OverloadedError
from raylm.frontend import Admission, Arrival, Request, Timelines
from raylm.ingress import build_asgi_app
from raylm.ingress.http.body import BodyReader
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import TEXT, events, served, until
from tests.ingress.http.test_streams import held
from tests.ingress.refused import error_of


@asynccontextmanager
async def silent(url: str, count: int, first: bytes = b"") -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that have announced a body, and have sent only ``first`` of it."""
    host, port = url.removeprefix("http://").split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    for _, writer in connections:
        writer.write(head.encode() + b"content-length: 1000\r\n\r\n" + first)
    try:
        yield [reader for reader, _ in connections]
    finally:
        for _, writer in connections:
            writer.close()


def app_of(llm: FakeAsyncLLM, **ingress: Any) -> Any:
    return build_asgi_app(llm, Config.model_validate({"ingress": ingress}))  # type: ignore[arg-type]


async def test_silent_clients_hold_no_places(llm: FakeAsyncLLM) -> None:
    llm.admission._max_requests = 8
    app = app_of(llm, max_ongoing_requests=8)
    async with served(app) as url, silent(url, 8, b"{"), httpx.AsyncClient(base_url=url) as client:
        await until(lambda: held(app) == 8)
        assert (llm.admission.requests, app.state.requests.num_ongoing) == (0, 0)
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=TEXT | {"stream": stream})
            assert answer.status_code == 200, answer.text
        assert events(answer.text)[-1] == "[DONE]"
    await until(lambda: held(app) == 0)


async def test_a_body_that_does_not_come_is_given_up(llm: FakeAsyncLLM) -> None:
    app = app_of(llm, body_timeout_s=0.2)
    async with served(app) as url, silent(url, 1, b"{") as (reader,):
        assert (await reader.readline()).split()[1] == b"408"
        *_, last = (await reader.readuntil(b"}}")).split(b"\r\n\r\n")
        assert orjson.loads(last)["error"]["code"] == "body_timeout"
        await until(lambda: held(app) == 0)


async def test_a_request_counts_once_its_body_is_there(llm: FakeAsyncLLM) -> None:
    app = app_of(llm, max_ongoing_requests=1)
    llm.gate, llm.open_outputs = asyncio.Event(), 0
    body = orjson.dumps(TEXT).ljust(1000)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        begun = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await begun.wait()
            yield body[10:]

        headers = {"content-type": "application/json"}
        slow = asyncio.create_task(client.post("/v1/completions", content=slowly(), headers=headers))
        await until(lambda: held(app) == 1)
        quick = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        await until(lambda: len(llm.calls) == 1)
        begun.set()
        error_of(await slow, 429)
        llm.gate.set()
        assert (await quick).status_code == 200


class Sender:
    """A client that sends the parts of a body when the test says so."""

    def __init__(self, bodies: BodyReader) -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self.reading = asyncio.create_task(self._read(bodies))

    async def _read(self, bodies: BodyReader) -> bytes:
        request = Request(Arrival("a", "/"), Timelines(), Admission())
        with request.connected():
            return await bodies.read(self._parts.get, request)

    async def send(self, size: int, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        for _ in range(4):
            await asyncio.sleep(0)


async def test_bytes_of_all_bodies_are_bounded_at_the_cost_of_the_oldest() -> None:
    bodies = BodyReader(max_bytes=100, max_bodies=50, timeout_s=60)
    senders = [Sender(bodies) for _ in range(9)]
    for sender in senders[:8]:
        await sender.send(100)
    assert not any(sender.reading.done() for sender in senders)
    await senders[8].send(60)
    with pytest.raises(OverloadedError):
        await senders[0].reading
    await senders[8].send(40)
    for sender in senders[1:]:
        await sender.send(0, more=False)
        assert await sender.reading == b"x" * 100
    assert (bodies._sizes, bodies._size) == ({}, 0)


async def test_the_number_of_bodies_is_bounded_at_the_cost_of_the_oldest() -> None:
    bodies = BodyReader(max_bytes=100, max_bodies=2, timeout_s=60)
    senders = [Sender(bodies) for _ in range(3)]
    with pytest.raises(OverloadedError):
        await senders[0].reading
    for sender in senders[1:]:
        await sender.send(10, more=False)
        assert len(await sender.reading) == 10


async def test_a_body_is_bounded_in_bytes_and_time() -> None:
    bodies = BodyReader(max_bytes=100, max_bodies=2, timeout_s=0.05)
    sender = Sender(bodies)
    await sender.send(101)
    with pytest.raises(BodyTooLargeError):
        await sender.reading
    late = Sender(bodies)
    await late.send(50)
    with pytest.raises(BodyTimeoutError):
        await late.reading
    assert (bodies._sizes, bodies._size) == ({}, 0)

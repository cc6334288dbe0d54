"""EventStream: the body of one streamed answer, with keep-alive messages while there are no new tokens."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from starlette.types import Send

from raylm.frontend import Record

KEEP_ALIVE_S = 5.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Sends the response head with the first chunk.

    If no chunk is sent for KEEP_ALIVE_S seconds, the stream sends ``keep_alive``, if there is one. While ``begun`` is
    False the answer can still have another status. The time of each write is added to ``record``.
    """

    def __init__(self, send: Send, keep_alive: bytes, record: Record) -> None:
        self.begun = False
        self._send = send
        self._record = record
        self._keep_alive = keep_alive
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> EventStream:
        self._time = asyncio.get_running_loop().time
        self._last = self._time()
        self._timer = asyncio.create_task(self._keep_alive_when_idle()) if self._keep_alive else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop_timer()

    async def end(self, chunk: bytes = b"") -> None:
        await self.send(chunk, more=False)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # breaks the reference cycle with this stream, so that no garbage collection is needed

    async def send(self, chunk: bytes, *, more: bool = True) -> None:
        self._last = self._time()
        record = self._record
        async with self._sending:
            if not self.begun:
                self.begun, record.status = True, 200
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            before = record.clock()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
            record.wrote(before)

    async def _keep_alive_when_idle(self) -> None:
        with suppress(Exception):  # other code watches for the disconnection of a broken connection
            while True:
                if (wait_s := self._last + KEEP_ALIVE_S - self._time()) > 0:
                    await asyncio.sleep(wait_s)
                else:
                    await self.send(self._keep_alive)

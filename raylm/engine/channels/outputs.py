"""The outputs of an EngineCore for one client on its node, as frames on a Unix socket, and that client's signs of life.

An item of Ray's streaming generator wakes threads of both processes, on cores that a model computes on, and takes 2 ms
of CPU more than a frame. Ray's generator stays open beside it, and tells how the outputs end.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

from raylm.engine.channels.frames import Frames, PrivateListener, frame
from raylm.messages import EngineCoreOutputs

MAX_OUTPUTS_IN_FLIGHT = 8
_ROOM_BYTES = 16 << 10  # in the socket, with what the kernel adds to each output; the outbox merges what has no room


class OutputListener:
    """Where a client expects one EngineCore of its node; to be closed in any case."""

    def __init__(self) -> None:
        self._listener = PrivateListener("outputs")
        self._listener.socket.setblocking(False)
        self.path = self._listener.path

    async def accept(self) -> OutputReceiver:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener.socket)
        _, receiver = await loop.connect_accepted_socket(OutputReceiver, connection)
        return receiver

    def close(self) -> None:
        self._listener.close()


class OutputReceiver(asyncio.Protocol):
    """The client's end."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._frames = Frames()
        self._held: deque[EngineCoreOutputs] = deque()
        self._is_lost = False
        self._news = asyncio.Event()

    def renew(self) -> None:
        """Tell the EngineCore that this client is there."""
        self._transport.write(b".")

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """All outputs until the EngineCore hangs up, however it ends; to be called once."""
        while True:
            while self._held:
                yield self._held.popleft()
            if self._is_lost:
                return
            self._news.clear()
            self._transport.resume_reading()
            await self._news.wait()

    async def close(self) -> None:
        self._transport.abort()
        await asyncio.sleep(0)  # until the event loop has closed the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no class of asyncio's

    def data_received(self, data: bytes) -> None:
        self._held.extend(self._frames.feed(data))
        if len(self._held) >= MAX_OUTPUTS_IN_FLIGHT:
            self._transport.pause_reading()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._news.set()


class OutputSender(asyncio.Protocol):
    """The EngineCore's end."""

    _transport: asyncio.WriteTransport

    def __init__(self, on_sign: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self._on_sign, self._on_lost = on_sign, on_lost
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def connect(cls, path: str, on_sign: Callable[[], None], on_lost: Callable[[], None]) -> OutputSender:
        """Connect to the client that listens at ``path``.

        ``on_sign`` is called when it says that it is there, ``on_lost`` when it hangs up or ends.
        """
        _, sender = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_sign, on_lost), path)
        return sender

    async def send(self, outputs: EngineCoreOutputs) -> None:
        """Send, and wait until there is room for more; that a client is gone ``on_lost`` alone tells."""
        self._transport.write(frame(outputs))
        await self._has_room.wait()

    def close(self) -> None:
        """Hang up when all is sent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)

    def data_received(self, data: bytes) -> None:
        self._on_sign()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_room.set()
        self._on_lost()

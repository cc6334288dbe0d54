"""Heartbeats: an engine's processes give signs of life to their supervisor over a Unix socket on their node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from threading import Thread
from typing import cast

from raylm.engine.channels.frames import PrivateListener

PERIOD_S = 0.25
SILENCE_LIMIT_S = 3.0
START_LIMIT_S = 60.0  # importing a library may hold Python's lock for long
_STALE_S = 2 * PERIOD_S
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end: pid, uid, gid


def send_heartbeats(path: str, name: str) -> None:
    """Give signs of life as ``name`` from a thread of its own, until the monitor at ``path`` is gone.

    The thread only needs Python's lock now and then: it does not wait for a step, nor for the event loop.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(f"{name}\n".encode())
    Thread(target=_beat, args=[connection], name="raylm-heartbeats", daemon=True).start()


def _beat(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        while True:
            connection.sendall(b".")
            time.sleep(PERIOD_S)


class HeartbeatMonitor:
    """The supervisor's end: of the processes ``names`` it says which one was lost first, and how.

    A process is lost when its connection ends, which the kernel sees to however it dies, or when nothing has come from
    it for a limit. Silence is counted in turns of this process's event loop: one that was stopped itself, with
    the whole machine perhaps, blames nobody. Who has not connected yet is Ray's to start.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._listener = PrivateListener("heartbeats", len(self._names))
        self.path = self._listener.path
        self._connections: dict[str, _Connection] = {}
        self._limit_s = START_LIMIT_S
        self.lost: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch())

    def on_start(self) -> None:
        """From now on all processes must give signs of life as they do while they serve."""
        self._limit_s = SILENCE_LIMIT_S

    def kill(self, name: str) -> None:
        """SIGKILL, which also ends a process that is stopped; nothing if it has ended or never began."""
        connection = self._connections.get(name)
        # As long as the connection is open nobody else has its pid, which is 0 in a container of its own.
        if connection is not None and connection.is_open and connection.pid:
            os.kill(connection.pid, signal.SIGKILL)

    def close(self) -> None:
        """Watch no longer, and kill what has been silent for longer than chance would have it."""
        for name, connection in self._connections.items():
            if connection.silent_s > _STALE_S:
                self.kill(name)
            connection.close()
        self._task.cancel()
        self._listener.close()
        self.lost.cancel()

    def on_name(self, name: str, connection: _Connection) -> None:
        self._connections[name] = connection

    def on_end(self, name: str) -> None:
        self._lose(name, "was lost")

    async def _watch(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener.socket
        server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)
        async with server:
            while True:
                await asyncio.sleep(PERIOD_S)
                for name, connection in self._connections.items():
                    connection.silent_s += PERIOD_S
                    if connection.silent_s > self._limit_s:
                        self._lose(name, f"has given no sign of life for {self._limit_s:g} s")

    def _lose(self, name: str, how: str) -> None:
        if not self.lost.done():
            self.lost.set_result((name, how))


class _Connection(asyncio.Protocol):
    """One process: its name comes first, then a byte each period."""

    _transport: asyncio.Transport

    def __init__(self, monitor: HeartbeatMonitor) -> None:
        self._monitor = monitor
        self._name = ""
        self._received = b""
        self.silent_s = 0.0
        self.pid = 0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no class of asyncio's
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid = _CREDENTIALS.unpack(peer)[0]

    def data_received(self, data: bytes) -> None:
        self.silent_s = 0.0
        if not self._name:
            self._received += data
            name, line_end, _ = self._received.partition(b"\n")
            if line_end:
                self._name = name.decode()
                self._monitor.on_name(self._name, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_open and self._name:
            self._monitor.on_end(self._name)
        self.is_open = False

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

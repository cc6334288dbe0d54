"""Renderer: the client of the template server. A process has one template server."""

from __future__ import annotations

import asyncio
import atexit
import marshal
import socket
from asyncio import timeout
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from raylm.errors import ConfigError
from raylm.fork_server import LENGTH, frame, frame_end, read_frame
from raylm.frontend.fork_server_process import TRIES, ForkServerProcess
from raylm.template_server import Answer

START_LIMIT_S = 120.0
"""Limit for the start of the server and a child. The server's imports take about 0.5 s."""
_PIECE = 2**16

_SERVER = ForkServerProcess("raylm.template_server")
atexit.register(_SERVER.close)


def job(name: str, *arguments: Any) -> bytes:
    """A frame with a job of template_server.JOBS. Raises ValueError if an argument is not plain data."""
    return frame(marshal.dumps((name, arguments)))


class Renderer:
    """Runs jobs one after another in a child of the template server. Replaces a child that ended."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._idle: socket.socket | None = None
        self._closed = False

    async def ask(self, job: bytes, limit_s: float) -> Answer:
        """Run ``job``, which may take ``limit_s`` after it is sent. Cancelling this call ends the child.

        Raises:
            TimeoutError: the job took longer. The child is ended.
            EngineUnavailableError: no child process could be started.
        """
        async with self._turn:
            while True:
                idle, self._idle = self._idle, None
                connection = idle or await _open()
                answer = None
                try:
                    async with timeout(limit_s):
                        answer = await _exchange(connection, job)
                finally:
                    if answer is None or self._closed:
                        connection.close()
                    else:
                        self._idle = connection
                if answer is not None:
                    return answer
                if idle is None:
                    return None, "The chat template crashed the process that renders it."

    def close(self) -> None:
        self._closed = True
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def __del__(self) -> None:
        self.close()  # a child must not outlive its Renderer


def check_templates(templates: Mapping[str, str]) -> None:
    """Compile every template in a child process, which may crash.

    Raises:
        ConfigError: a template is not valid Jinja; the message names it.
    """
    for name, template in templates.items():
        connection, _ = _SERVER.connect()
        with connection:
            connection.settimeout(START_LIMIT_S)
            fault: str | None = "its compilation crashed the process"
            with suppress(OSError):
                connection.recv(1)
                connection.sendall(job("check", template))
                if (body := read_frame(connection)) is not None:
                    _, fault = marshal.loads(body)
        if fault is not None:
            raise ConfigError(f"model: the chat template {name!r} is not valid: {fault}")


async def _open() -> socket.socket:
    """Connect to a child that is ready."""
    loop = asyncio.get_running_loop()
    for _ in range(TRIES):
        connection, control = _SERVER.connect()
        ready = b""
        try:
            with suppress(ConnectionError, TimeoutError):
                async with timeout(START_LIMIT_S):
                    ready = await loop.sock_recv(connection, 1)
        finally:
            if not ready:
                connection.close()
        if ready:
            return connection
        _SERVER.lost(control)
    raise _SERVER.unavailable()


async def _exchange(connection: socket.socket, job: bytes) -> Answer | None:
    """The answer of a child; None if the child ended first."""
    loop, received = asyncio.get_running_loop(), bytearray()
    with suppress(ConnectionError):
        await loop.sock_sendall(connection, job)
        while (end := frame_end(received)) is None or len(received) < end:
            piece = await loop.sock_recv(connection, _PIECE)
            if not piece:
                return None
            received += piece
        text, fault = marshal.loads(memoryview(received)[LENGTH.size :])
        return text, fault
    return None

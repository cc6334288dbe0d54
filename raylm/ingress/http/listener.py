"""CrowdServer: uvicorn's server with many accepted connections per turn of the event loop.

uvloop uses libuv, which accepts one connection per turn. A probe on a new connection would wait for as many turns as
there are new connections before it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import uvicorn

from raylm.ingress.http.errors import logger

PER_TURN = 64  # each takes about 0.05 ms
_PAUSE_S = 1.0
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class CrowdListener:
    """Accepts the waiting connections of ``sock``, up to PER_TURN per turn of the running event loop, until ``close``.

    If the system cannot open more connections, the listener tries again after a second, as asyncio's servers do.
    """

    def __init__(self, sock: socket.socket, config: uvicorn.Config, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sock, self._config, self._protocol = sock, config, protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._listen()

    def close(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until every connection accepted before ``close`` has its protocol."""
        while self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(PER_TURN):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # the waiting caller is gone
                logger.error("no connection can be accepted for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._sock)
                self._resuming = self._loop.call_later(_PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._config.ssl)
        except OSError as error:  # includes TLS errors
            logger.debug("a connection was not opened: %s", error)
            connection.close()


class CrowdServer(uvicorn.Server):
    """uvicorn's server for bound sockets, as Serve passes them, with CrowdListener for accepting."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers = [CrowdListener(sock, self.config, self._protocol) for sock in sockets or ()]  # type: ignore[misc]

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

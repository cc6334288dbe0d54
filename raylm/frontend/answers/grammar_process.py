"""GrammarProcess: the front end's side of the grammar server, which it starts when it is first needed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from raylm.errors import EngineUnavailableError
from raylm.frontend.answers.grammar_bounds import Form
from raylm.grammar_server import Verdict, frame

_TRIES = 2


class GrammarProcess:
    """Has grammars proved in processes that may die; a server that was lost is started again for the next one."""

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._path = path
        self._eos_token_ids = eos_token_ids
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def prove(self, form: Form, cpu_s: float, nice: int) -> Verdict | None:
        """The verdict, None if the process died of the form; to cancel this ends the process.

        Raises:
            EngineUnavailableError: no process could be had.
        """
        job = frame({"form": dict([form]), "cpu_s": cpu_s, "nice": nice})
        for _ in range(_TRIES):
            connection, control = self._connect()
            try:
                found = await _ask(connection, job)
            finally:
                connection.close()
            if found:
                return _verdict(found[1:])
            if self._control is control:
                self.close()
        raise EngineUnavailableError("The process that compiles the forms of answers cannot be started.")

    def close(self) -> None:
        """End the server; what it began goes on, on connections of its own."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        """A connection to a process of its own, and the server's that forks it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            for _ in range(_TRIES):
                try:
                    control = self._control or self._start()
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return ours, control
                except OSError:
                    self.close()
        ours.close()
        raise EngineUnavailableError("The process that compiles the forms of answers cannot be started.")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-m", "raylm.grammar_server", str(theirs.fileno()), str(self._path)]
        with theirs:
            self._server = subprocess.Popen(
                [*command, *map(str, self._eos_token_ids)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        return ours


def _verdict(answer: bytes) -> Verdict | None:
    """None if nothing was answered, or not to the end."""
    with suppress(ValueError):
        grammar, fault = json.loads(answer)
        return grammar, fault
    return None


async def _ask(connection: socket.socket, job: bytes) -> bytes:
    """All that is answered; nothing if the job was not begun."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    with suppress(ConnectionError):
        await loop.sock_sendall(connection, job)
        while piece := await loop.sock_recv(connection, 2**16):
            answer += piece
    return bytes(answer)

"""GrammarProcess: the client of the grammar server."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path

from raylm.errors import EngineUnavailableError
from raylm.fork_server import frame
from raylm.frontend.answers.grammar_bounds import Form
from raylm.frontend.fork_server_process import TRIES, ForkServerProcess
from raylm.grammar_server import Verdict


class GrammarProcess(ForkServerProcess):
    """Compiles grammars in child processes of the grammar server. A lost server is started again for the next form."""

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__("raylm.grammar_server", str(path), *map(str, eos_token_ids))

    async def prove(self, form: Form, cpu_s: float, nice: int) -> Verdict | None:
        """Compile a form in a child. Returns None if the child died. Cancelling this call ends the child.

        Raises:
            EngineUnavailableError: no child process could be started.
        """
        job = frame(json.dumps({"form": dict([form]), "cpu_s": cpu_s, "nice": nice}).encode())
        for _ in range(TRIES):
            connection, control = self.connect()
            try:
                found = await _ask(connection, job)
            finally:
                connection.close()
            if found:
                return _verdict(found[1:])
            self.lost(control)
        raise self.unavailable()

    def unavailable(self) -> EngineUnavailableError:
        return EngineUnavailableError("The process that compiles structured outputs cannot be started.")


def _verdict(answer: bytes) -> Verdict | None:
    """Parse an answer; None if it is empty or cut."""
    with suppress(ValueError):
        grammar, fault = json.loads(answer)
        return grammar, fault
    return None


async def _ask(connection: socket.socket, job: bytes) -> bytes:
    """Send the job and return the whole answer; empty if the job was not started."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    with suppress(ConnectionError):
        await loop.sock_sendall(connection, job)
        while piece := await loop.sock_recv(connection, 2**16):
            answer += piece
    return bytes(answer)

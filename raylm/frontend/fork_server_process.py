"""ForkServerProcess: starts a fork server when it is first needed, and connects to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from raylm.errors import EngineUnavailableError

TRIES = 2


class ForkServerProcess:
    """Connects to children of ``python -m MODULE FD ARGUMENTS``. A lost server is started again."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module, self._arguments = module, arguments
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def close(self) -> None:
        """End the server. Its children continue on their own connections."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def start(self) -> None:
        """Start the server if it does not run. Does not wait until it is ready."""
        if self._control is None:
            self._start()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Fork a child. Returns (the connection to it, the server's control socket).

        Raises:
            EngineUnavailableError: the server cannot be started.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            for _ in range(TRIES):
                try:
                    control = self._control or self._start()
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return ours, control
                except OSError:
                    self.close()
        ours.close()
        raise self.unavailable()

    def lost(self, control: socket.socket) -> None:
        """Close a server that failed to fork."""
        if self._control is control:
            self.close()

    def unavailable(self) -> EngineUnavailableError:
        return EngineUnavailableError(f"The process {self._module} cannot be started.")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        return ours

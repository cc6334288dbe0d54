"""ServeProcess: the child process that runs Serve, in its own session together with every process that Ray starts."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from raylm.cli.serve_file import ServedFile
from raylm.cli.sessions import PrivateFolder, remove_ended
from raylm.cli.start_checks import ray_address, temporary_directory
from raylm.errors import ConfigError

_POLL_S = 0.05
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray would run its workers at nice 15, below all other processes of the machine
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
}
_OWN_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # its ports listen on 127.0.0.1, as on these systems
_HAPROXYS_PARENT = "/tmp"  # Serve's default; the path of a socket leaves 29 bytes beside the name that Serve appends
_HAPROXYS_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_INTERNAL_PORTS = {  # ports of HAProxy and Serve's fallback proxy; a second server on a machine needs other ports
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen at this address now. ConfigError if no server ever could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            reason = error.strerror or str(error)
            raise ConfigError(f"http_options: cannot listen on {host}:{port}: {reason}.") from error
    return True


def claim_port(port: int, host: str = "") -> socket.socket | None:
    """Claim a port before a server listens on it, so that no other `raylm serve` on this machine chooses it.

    The claim is held until the socket is closed, at the latest when this process ends. None if another process holds
    it.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0raylm-port-{host}-{port}")  # an abstract socket leaves no file behind
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise  # the system has no abstract sockets, so no claim can succeed
        return None
    return claim


def internal_ports() -> list[int]:
    """The ports of HAProxy's and Serve's internal listeners."""
    return list(_INTERNAL_PORTS.values())


def serve_ports() -> tuple[dict[str, str], list[socket.socket]]:
    """(environment variables with free ports for HAProxy's and Serve's internal listeners, the claims of the ports)."""
    ports, claims = {}, []
    for name, port in _INTERNAL_PORTS.items():
        claim = claim_port(port) if port_is_free("", port) else None
        while claim is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            claim = claim_port(port)
        ports[name] = str(port)
        claims.append(claim)
    return ports, claims


class ServeProcess:
    """The server process. All processes of its session belong to it, also orphans: Ray orphans HAProxy."""

    def __init__(self, served: ServedFile, dashboard: bool) -> None:
        ports, self._claims = serve_ports()
        self._defaults: dict[str, str] = {}  # of an own Ray: where it listens, and HAProxy's files
        self._folders: list[PrivateFolder] = []
        # With an own Ray every process inherits the environment, so that workers started in advance can be used.
        environment = {} if ray_address() else served.environment | self._make_folders()
        self.lines: queue.Queue[str] = queue.Queue()  # a SimpleQueue's timeout is lost when a signal comes in its end
        self._child = subprocess.Popen(
            [sys.executable, "-m", "raylm.cli.main", "run-serve", *["--dashboard"] * dashboard],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._defaults | _ENVIRONMENT | ports | os.environ | environment,  # the user's variables stay
            start_new_session=True,
        )
        assert self._child.stdin is not None
        with self._child.stdin as stdin, suppress(BrokenPipeError):
            json.dump({"source": served.source, "tree": served.tree}, stdin)
        threading.Thread(target=self._read, daemon=True).start()

    def _make_folders(self) -> dict[str, str]:
        """Create the folders of an own Ray and its HAProxy. Returns the environment variables to set."""
        parent = temporary_directory()
        rays, haproxys = self._folders = [PrivateFolder(parent), PrivateFolder(_HAPROXYS_PARENT)]
        self._defaults = _OWN_RAY | {name: str(haproxys.path / file) for name, file in _HAPROXYS_FILES.items()}
        threading.Thread(
            target=remove_ended,
            args=[{parent, _HAPROXYS_PARENT, tempfile.gettempdir(), "/dev/shm"}],  # the last two for sockets of engines
            name="old folders",
            daemon=True,
        ).start()
        return {"RAY_TMPDIR": str(rays.path)}

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.lines.put(line.rstrip())

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def interrupt(self) -> None:
        if self.is_running:
            self._child.send_signal(signal.SIGINT)

    def kill(self, timeout_s: float) -> bool:
        """Kill every process of the session. Returns whether none is left after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (members := session_members(self._child.pid)) or self.is_running:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        for claim in self._claims:
            claim.close()
        if self._folders:
            rays, haproxys = self._folders
            rays.close()  # the logs stay
            haproxys.remove()
        return True


def session_members(session: int) -> list[int]:
    """The ids of all live processes of a session, from Linux's /proc."""
    members = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            # The fields of stat follow the process's name in parentheses. The name may contain any character.
            state, _, _, its_session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if entry.name.isdecimal() and state != "Z" and int(its_session) == session:
                members.append(int(entry.name))
    return members

"""A served model for end-to-end tests: `raylm serve` in a child process, on a free port, with its processes by name."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from raylm.cli.serve_process import session_members

ROOT = Path(__file__).parent.parent
START_LIMIT_S = 300
ARGS: dict[str, Any] = {"dtype": "float32", "cache": {"num_blocks": 2048}, "engine": {"threads": 2}}


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_file(path: Path, port: int, args: dict[str, Any], *, haproxy: bool = True) -> Path:
    """Write configs/llama.yaml with another port and other args to ``path``."""
    data = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    data["http_options"]["port"] = port
    data["applications"][0]["args"] |= args
    if not haproxy:
        data["controller_options"]["runtime_env"]["env_vars"].pop("RAY_SERVE_ENABLE_HA_PROXY")
    path.write_text(yaml.safe_dump(data))
    return path


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    return {"model": "embedded", "messages": [{"role": "user", "content": content}], "temperature": 0} | fields


def text_of(line: str) -> str:
    """The text in one line of a stream."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices") or [{"delta": {}}]
    return choices[0]["delta"].get("content") or ""


def websocket_upgrade(port: int, path: str) -> bytes:
    """The answer to a WebSocket upgrade without an API key, to the end of the connection or of a short answer."""
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n".encode()
        )
        answer = b""
        while part := client.recv(65536):
            answer += part
            if answer.endswith(b"}"):
                break
    return answer


class Server:
    """`raylm serve`. Leaving the context ends all its processes, in whatever state they are."""

    def __init__(
        self,
        path: Path,
        port: int,
        *options: str,
        ready: str = "ready ",
        python: Path | None = None,
        **environment: str,
    ) -> None:
        """``options`` are those of the command. Without options, Ray's dashboard is off.

        The server is ready when its output contains ``ready``. ``python`` is another interpreter with its own RayLM.
        """
        options, self._ready = options or ("--no-dashboard",), ready
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = path.with_suffix(".log")
        with self.log.open("w") as log:
            self._launcher = subprocess.Popen(
                [python or sys.executable, "-m", "raylm.cli.main", "serve", str(path), *options],
                cwd=path.parent if python else ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"XDG_STATE_HOME": str(path.parent)} | environment,  # the folder of stored responses
            )

    def __enter__(self) -> Server:
        try:
            self.wait_until(lambda: self._ready in self.log.read_text(), "is not ready")
        except BaseException:  # __exit__ does not run if __enter__ fails
            self.stop(signal.SIGTERM)
            raise
        self._session = self._child()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all processes at once: the command, Ray, and all their children."""
        self._launcher.kill()
        while members := session_members(self._session):
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._launcher.wait()

    def processes(self, name: str = "") -> list[int]:
        """Process ids: all of the server's, or those of the actors of a class."""
        return [pid for pid in session_members(self._session) if title(pid).startswith(f"ray::{name}" if name else "")]

    def kill_actor(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the only actor of a class."""
        (pid,) = self.processes(name)
        os.kill(pid, number)

    def wait_ready(self) -> None:
        """Wait until the server answers /health with 200 again."""
        self.wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 200, "does not come back")

    def stop(self, number: int) -> int:
        """Send a signal to the launcher, and wait for its end. Returns the exit status."""
        self._launcher.send_signal(number)
        return self._launcher.wait(timeout=300)

    def _child(self) -> int:
        (pid,) = (
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _parent(entry) == self._launcher.pid
        )
        return pid

    def wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Wait for the condition. If the server ends before, or after a time limit, fail with the server's output."""
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server {complaint}:\n{self.log.read_text()}")
            time.sleep(0.05)


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""

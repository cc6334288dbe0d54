"""Launcher: serves a Serve configuration file in a child, tells its start in clean lines, and ends all of it."""

from __future__ import annotations

import queue
import re
import signal
import time
import urllib.error
import urllib.request
from collections import deque
from types import FrameType

from raylm import __version__
from raylm.checkpoint import resolve
from raylm.cli.serve_file import ServedFile
from raylm.cli.serve_process import ServeProcess, claim_port, port_is_free
from raylm.config import IngressConfig
from raylm.errors import ConfigError
from raylm.stages import parse

TEARDOWN_S = 7.0
KILL_S = 2.0
_POLL_S = 0.05
_LINES_LAG_S = 1.0
_MOST_LINES = 1000
_SHOWN_ON_FAILURE = 30
_SUBMITTED = "Submitted deploy config successfully"
_FATAL = re.compile(
    r"Deploying app '.*' failed|Runtime env setup for app '.*' failed|failed to start \d+ times in a row"
)
_OUR_ACTORS = re.compile(r"\((?:ServeReplica|EngineCoreActor|WorkerActor)[^)]*\) (.*)")


class Launcher:
    """Runs until it is told to stop (SIGINT, SIGTERM, SIGHUP) or the server has ended; a second signal kills."""

    def __init__(self, served: ServedFile, verbose: bool) -> None:
        self._served = served
        self._verbose = verbose
        self._probe = urllib.request.Request(f"{served.url}/health", headers=_key_header(served.config.ingress))
        self._started = time.monotonic()
        self._signals = 0
        self._ready = False
        self._failure: str | None = None
        self._told: set[str] = set()
        self._hidden: deque[str] = deque(maxlen=_SHOWN_ON_FAILURE)

    def run(self) -> int:
        """Serve; return the exit status.

        Raises:
            ConfigError: the port is taken, the host is none of this machine's, or the model is not there.
        """
        config, served = self._served.config, self._served
        claim = claim_port(served.port, served.host) if port_is_free(served.host, served.port) else None
        if claim is None:
            raise ConfigError(f"http_options.port: something listens on port {served.port} already.")
        resolve(config.model, config.revision)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._tell(
            "config", f"RayLM {__version__}, {served.path}: model {config.model}, executor {config.engine.executor}"
        )
        process = ServeProcess(served.path)
        try:
            self._watch(process)
        finally:
            clean = self._stop(process)
            claim.close()
        return 0 if self._signals and clean and self._failure is None else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _watch(self, process: ServeProcess) -> None:
        """Follow the server until a signal, its end, or a start that failed."""
        while process.is_running and not self._signals and self._failure is None:
            self._take_lines(process)
            if not self._ready and _is_healthy(self._probe):
                self._await_engine_lines(process)
                self._ready = True
                self._tell("ready", f"{self._served.url}/v1   (Ctrl-C stops)")
        self._take_lines(process)
        if not self._signals and self._failure is None:
            self._fail("the server ended by itself; what it wrote last is above")
        if self._failure is not None:
            self._tell("failed", self._failure)

    def _await_engine_lines(self, process: ServeProcess) -> None:
        """What the engine says of itself comes a moment after it serves; it should be read before 'ready'."""
        deadline = time.monotonic() + _LINES_LAG_S
        while "kv" not in self._told and time.monotonic() < deadline:
            self._take_lines(process)

    def _stop(self, process: ServeProcess) -> bool:
        """Let Serve shut down in order, then end what is left; whether nothing is."""
        began, grace_s = time.monotonic(), self._served.config.ingress.shutdown_grace_s
        limit_s = 0.0
        if process.is_running and (self._ready or process.is_on_shared_cluster):
            limit_s = grace_s + TEARDOWN_S
            self._tell("stop", f"running requests get up to {grace_s:g} s to end")
            process.interrupt()
        before = self._signals
        while process.is_running and self._signals == before and time.monotonic() - began < limit_s:
            self._take_lines(process)
        clean = process.kill(KILL_S)
        if self._signals:
            self._tell("stopped", f"after {time.monotonic() - began:.1f} s")
        return clean

    def _take_lines(self, process: ServeProcess) -> None:
        """Handle what the server has written; waits a moment for the first line."""
        try:
            self._take_line(process.lines.get(timeout=_POLL_S))
            for _ in range(_MOST_LINES):
                self._take_line(process.lines.get_nowait())
        except queue.Empty:
            return

    def _take_line(self, line: str) -> None:
        said = parse(line)
        ours = _OUR_ACTORS.search(line)
        if self._verbose:
            print(line, flush=True)
        if said is not None:
            kind, stage, text = said
            self._tell(stage, text)
            if kind == "error" and not self._ready:
                self._failure = "the server cannot start; the reason is above"
        elif _SUBMITTED in line:
            self._tell("serve", "controller and HTTP proxy are up")
        elif ours and self._ready and not self._signals and not self._verbose:
            print(ours[1], flush=True)
        else:
            self._hidden.append(line)
            if _FATAL.search(line) and not self._ready and self._failure is None:
                self._fail("the server cannot start; what it wrote last is above")

    def _fail(self, failure: str) -> None:
        if not self._verbose:
            print("\n".join(self._hidden), flush=True)
        self._failure = failure

    def _tell(self, stage: str, text: str) -> None:
        self._told.add(stage)
        print(f"{time.monotonic() - self._started:6.1f} s  {stage:8} {text}", flush=True)


def _key_header(config: IngressConfig) -> dict[str, str]:
    """What opens /health where it is closed.

    Raises:
        ConfigError: the keys cannot be read.
    """
    if "/health" in config.open_paths or (config.api_keys_file is None and config.api_keys_env is None):
        return {}
    from raylm.ingress import read_keys  # here, so that starting need not wait for it

    (_, key), *_ = read_keys(config) or [("", "")]
    return {"x-api-key": key}


def _is_healthy(probe: urllib.request.Request) -> bool:
    """Whether a request would be answered now."""
    try:
        with urllib.request.urlopen(probe, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False

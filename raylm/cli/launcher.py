"""Launcher: serves a Serve configuration file in a child process, reports its start in clean lines, and ends it all."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
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
_ENGINE_LINES_S = 1.0
_LINES_AT_ONCE = 1000
_SHOWN_ON_FAILURE = 30
_SUBMITTED = "Submitted deploy config successfully"
_FATAL = re.compile(r"(Deploying|Runtime env setup for) app '.*' failed|failed to start \d+ times in a row")
_OUR_ACTORS = re.compile(r"\((?:ServeReplica|EngineCoreActor|WorkerActor)[^)]*\) (.*)")


class Launcher:
    """Runs until a signal to stop (SIGINT, SIGTERM, SIGHUP) or the server's end; a second signal kills the server."""

    def __init__(self, served: ServedFile, verbose: bool) -> None:
        self._served = served
        self._verbose = verbose
        self._probe = urllib.request.Request(f"{served.url}/health", headers=_key_header(served.config.ingress))
        self._started = time.monotonic()
        self._signals = 0
        self._ready = False
        self._failure: str | None = None
        self._reported: set[str] = set()
        self._hidden: deque[str] = deque(maxlen=_SHOWN_ON_FAILURE)

    def run(self) -> int:
        """Serve; return the exit status. A ConfigError says that the port is taken, or host or model are not there."""
        config, served = self._served.config, self._served
        claim = claim_port(served.port, served.host) if port_is_free(served.host, served.port) else None
        if claim is None:
            raise ConfigError(f"http_options.port: something listens on port {served.port} already.")
        resolve(config.model, config.revision)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        what = f"model {config.model}, executor {config.engine.executor}"
        self._report("config", f"RayLM {__version__}, {served.path}: {what}")
        process = ServeProcess(served.path)
        try:
            self._follow(process)
        finally:
            clean = self._stop(process)
            claim.close()
        return 0 if self._signals and clean and self._failure is None else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _follow(self, process: ServeProcess) -> None:
        while process.is_running and not self._signals and self._failure is None:
            self._read_lines(process)
            if not self._ready and _is_healthy(self._probe):
                # The engine's lines arrive a moment after it serves, and belong before 'ready'.
                deadline = time.monotonic() + _ENGINE_LINES_S
                while "kv" not in self._reported and time.monotonic() < deadline:
                    self._read_lines(process)
                self._ready = True
                self._report("ready", f"{self._served.url}/v1   (Ctrl-C stops)")
        self._read_lines(process)
        if not self._signals and self._failure is None:
            self._fail("the server ended by itself; what it wrote last is above")
        if self._failure is not None:
            self._report("failed", self._failure)

    def _stop(self, process: ServeProcess) -> bool:
        """Returns whether nothing is left."""
        began, grace_s = time.monotonic(), self._served.config.ingress.shutdown_grace_s
        limit_s = 0.0
        # On a Ray that was there before, killing the child would leave the actors of a server that is still starting.
        if process.is_running and (self._ready or "RAY_ADDRESS" in os.environ):
            limit_s = grace_s + TEARDOWN_S
            self._report("stop", f"running requests get up to {grace_s:g} s to end")
            process.interrupt()
        before = self._signals
        while process.is_running and self._signals == before and time.monotonic() - began < limit_s:
            self._read_lines(process)
        clean = process.kill(KILL_S)
        if self._signals:
            self._report("stopped", f"after {time.monotonic() - began:.1f} s")
        return clean

    def _read_lines(self, process: ServeProcess) -> None:
        try:
            self._handle_line(process.lines.get(timeout=_POLL_S))
            for _ in range(_LINES_AT_ONCE):
                self._handle_line(process.lines.get_nowait())
        except queue.Empty:
            return

    def _handle_line(self, line: str) -> None:
        from_actor = _OUR_ACTORS.search(line)
        if self._verbose:
            print(line, flush=True)
        if stage_line := parse(line):
            kind, stage, text = stage_line
            self._report(stage, text)
            if kind == "error" and not self._ready:
                self._failure = "the server cannot start; the reason is above"
        elif _SUBMITTED in line:
            self._report("serve", "controller and HTTP proxy are up")
        elif from_actor and self._ready and not self._signals and not self._verbose:
            print(from_actor[1], flush=True)
        else:
            self._hidden.append(line)
            if _FATAL.search(line) and not self._ready and self._failure is None:
                self._fail("the server cannot start; what it wrote last is above")

    def _fail(self, failure: str) -> None:
        if not self._verbose:
            print("\n".join(self._hidden), flush=True)
        self._failure = failure

    def _report(self, stage: str, text: str) -> None:
        self._reported.add(stage)
        print(f"{time.monotonic() - self._started:6.1f} s  {stage:8} {text}", flush=True)


def _key_header(config: IngressConfig) -> dict[str, str]:
    if "/health" in config.open_paths or (config.api_keys_file is None and config.api_keys_env is None):
        return {}
    from raylm.ingress import read_keys  # here, so that starting need not wait for it

    (_, key), *_ = read_keys(config) or [("", "")]
    return {"x-api-key": key}


def _is_healthy(probe: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(probe, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

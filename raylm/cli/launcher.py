"""Launcher: serves a configuration in a child process, reports the stages of the start, and stops every process."""

from __future__ import annotations

import http.client
import json
import queue
import re
import shlex
import signal
import ssl
import time
import urllib.request
from collections import deque
from dataclasses import dataclass
from types import FrameType

from raylm import __version__
from raylm.checkpoint import resolve
from raylm.cli.serve_file import ServedApplication, ServedFile
from raylm.cli.serve_process import ServeProcess, claim_port, port_is_free
from raylm.cli.start_checks import check_cluster, check_machine, keep_token_private, ray_address
from raylm.cli.terminal import JSONTerminal, Terminal
from raylm.config import Config, IngressConfig
from raylm.errors import ConfigError
from raylm.frontend import check_observers
from raylm.models import check_checkpoint
from raylm.stages import Kind, parse

TEARDOWN_S = 7.0
KILL_S = 2.0
_POLL_S = 0.05
_ENGINE_LINES_S = 1.0
_LINES_AT_ONCE = 1000
_SHOWN_ON_FAILURE = 30
DEPLOYED = "deploy"  # the stage that the driver reports when Serve has accepted the applications
_OUR_ACTORS = re.compile(r"\((?:ServeReplica|EngineCoreActor|WorkerActor)[^)]*\) (.*)")


@dataclass(frozen=True)
class Settings:
    """Settings of the command. ``dashboard`` None is the default: the dashboard is started."""

    verbose: bool = False
    dashboard: bool | None = None
    ready_timeout_s: float = 600.0


class Launcher:
    """Runs until SIGINT, SIGTERM, SIGHUP or the end of the server. A second signal kills the server."""

    def __init__(self, served: ServedFile, settings: Settings) -> None:
        self._served = served
        self._settings = settings
        self._address = ray_address()
        node = (self._address or "").rpartition(":")[0].strip("[]") or "127.0.0.1"
        self._urls = {
            application.name: served.url(application.route_prefix or "/", node) for application in served.ours
        }
        self._waited_for = {application.name for application in served.applications}
        self._started = time.monotonic()
        is_json = any(config.log_format == "json" for config in served.configs())
        self._terminal = JSONTerminal() if is_json else Terminal()
        self._signals = 0
        self._ready = False
        self._failure: str | None = None
        self._refusal: str | None = None
        self._reported: set[str] = set()
        self._hidden: deque[str] = deque(maxlen=_SHOWN_ON_FAILURE)

    def run(self) -> int:
        """Serve. Returns the exit status.

        Raises:
            ConfigError: the configuration or the machine must be changed first.
        """
        served = self._served
        if self._address is None:
            check_machine()
        else:
            check_cluster(self._address)
            if self._settings.dashboard is not None:
                raise ConfigError("--dashboard has no effect with RAY_ADDRESS; remove one of them.")
        keep_token_private()
        claim = None
        if self._address is None:
            claim = claim_port(served.port, served.host) if port_is_free(served.host, served.port) else None
            if claim is None:
                raise ConfigError(f"http_options.port: port {served.port} is already in use.")
        for config in served.configs():
            check_checkpoint(resolve(config.model, config.revision))
            check_observers(config)
        self._take_signals()
        self._report("config", f"RayLM {__version__}, {served.source}: {'; '.join(map(_describe, served.configs()))}")
        process = ServeProcess(served, self._address is None and self._settings.dashboard is not False)
        try:
            self._follow(process)
        finally:
            clean = self._stop(process)
            if claim is not None:
                claim.close()
            self._terminal.close()
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        return 0 if self._signals and clean and self._failure is None else 1

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup: the server outlives its terminal
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _follow(self, process: ServeProcess) -> None:
        while process.is_running and not self._signals and self._failure is None:
            self._read_lines(process)
            if not self._ready:
                self._look_for_answers(process)
        self._read_lines(process)
        if not self._signals and self._failure is None:
            self._fail("the server ended by itself; what it wrote last is above")
        if self._failure is not None and self._refusal is None:
            self._report("failed", self._failure)

    def _look_for_answers(self, process: ServeProcess) -> None:
        # On a shared Ray cluster, another application may answer before the deployment.
        ours = self._served.ours if DEPLOYED in self._reported else []
        answering = (app for app in ours if app.name in self._waited_for and self._is_healthy(app))
        self._waited_for -= {application.name for application in answering}
        if not self._waited_for:
            # The engine's lines arrive a moment after it is ready. They should be printed before 'ready'.
            deadline = time.monotonic() + _ENGINE_LINES_S
            while "kv" not in self._reported and time.monotonic() < deadline:
                self._read_lines(process)
            self._ready = True
            for application in self._served.ours:
                assert application.config is not None
                self._report(
                    "ready", f"{application.config.model_name} at {self._urls[application.name]}/v1   (Ctrl-C stops)"
                )
            self._report("try", _curl(self._served.ours[0], self._urls))
            for application in self._served.ours:
                self._report("console", f"{self._urls[application.name]}/console")
        elif time.monotonic() - self._started > self._settings.ready_timeout_s:
            names = " and ".join(sorted(self._waited_for))
            self._fail(f"{names} did not answer within {self._settings.ready_timeout_s:g} s (--ready-timeout)")

    def _stop(self, process: ServeProcess) -> bool:
        """Stop the server. Returns whether no process is left."""
        began = time.monotonic()
        grace_s = max(config.ingress.shutdown_grace_s for config in self._served.configs())
        limit_s = 0.0
        # On a Ray cluster that was running before, killing the child would leave the actors of a starting server.
        if process.is_running and (self._ready or self._address is not None):
            limit_s = grace_s + TEARDOWN_S
            if self._ready:
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
        if self._settings.verbose:
            self._terminal.verbose(line)
        if stage_line := parse(line):
            self._handle_stage(*stage_line, line)
        elif from_actor and self._ready and not self._signals and not self._settings.verbose:
            self._terminal.output(line, from_actor[1])
        else:
            self._hidden.append(line)

    def _handle_stage(self, kind: Kind, stage: str, text: str, line: str = "") -> None:
        if self._failure is not None:
            return  # what follows from it
        if kind == "error" and stage == "config" and not self._ready:
            self._failure = self._refusal = text
            return
        if kind == "error" and stage == "serve":
            self._fail("the server ends; the reason is above")
        self._report(stage, text, kind, line)
        if stage == "running":
            self._waited_for.discard(text.partition(" at ")[0])
        if kind == "error" and not self._ready:
            self._failure = "the server cannot start; the reason is above"

    def _fail(self, failure: str) -> None:
        if not self._settings.verbose:
            self._terminal.output("\n".join(self._hidden))
        self._failure = failure

    def _is_healthy(self, application: ServedApplication) -> bool:
        assert application.config is not None
        url, headers = f"{self._urls[application.name]}/health", _key_header(application.config.ingress)
        unverified = ssl._create_unverified_context() if url.startswith("https") else None
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # without the proxies of the environment, which do not reach this machine
            urllib.request.HTTPSHandler(context=unverified),
        )
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _report(self, stage: str, text: str, kind: Kind = "stage", line: str = "") -> None:
        self._reported.add(stage)
        self._terminal.stage(kind, stage, text, line)


def _describe(config: Config) -> str:
    return f"model {config.model}, executor {config.engine.executor}"


def _curl(application: ServedApplication, urls: dict[str, str]) -> str:
    """A curl command with a request to this application."""
    assert application.config is not None
    message = {"role": "user", "content": "What is a KV cache?"}
    body = json.dumps({"model": application.config.model_name, "messages": [message]})
    words = [
        "curl",
        f"{urls[application.name]}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    bounds = application.config.ingress
    key = ' -H "Authorization: Bearer $KEY"' if bounds.has_keys else ""
    return shlex.join(words) + key


def _key_header(config: IngressConfig) -> dict[str, str]:
    if "/health" in config.open_paths or not config.has_keys:
        return {}
    from raylm.ingress import read_keys  # imported here, so that it does not delay the start

    return {"x-api-key": next(key for _, key in read_keys(config) or ())}

"""Engines that a benchmark starts, measures and stops: a runner in its own interpreter, or an HTTP server.

Every engine and every process it leaves behind is a child of this process. So its CPU time can be separated from that
of other processes on the machine, and no process survives the run.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.error import URLError

import aiohttp

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICKS = os.sysconf("SC_CLK_TCK")
_STOP_S, _POLL_S = 40.0, 0.2


class EngineError(Exception):
    """An engine did not start, or did not do what was requested."""


# ---------------------------------------------------------------- processes and their CPU time


def adopt_orphans() -> None:
    """Become the parent of processes that a child leaves behind (Ray orphans HAProxy), on Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stat() -> Iterator[tuple[int, int, float]]:
    """(process, parent, CPU seconds including reaped children) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                yield int(entry.name), int(fields[1]), sum(map(int, fields[11:15])) / _TICKS


def family(root: int) -> dict[int, float]:
    """CPU seconds of ``root`` and of all processes below it, by process id."""
    found = {pid: (parent, seconds) for pid, parent, seconds in _stat()}
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in found.items():
        below.setdefault(parent, []).append(pid)
    members, todo = {}, [root]
    while todo:
        pid = todo.pop()
        if pid in found:
            members[pid] = found[pid][1]
            todo += below.get(pid, [])
    return members


def _busy_seconds() -> float:
    """CPU time of the whole machine since it started."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / _TICKS


@dataclass
class Meter:
    """Measures the cores used by this run's processes and by other processes during a block."""

    mine: float = 0.0
    others: float = 0.0


@contextmanager
def meter() -> Iterator[Meter]:
    found, started = Meter(), time.perf_counter()
    busy, mine = _busy_seconds(), sum(family(os.getpid()).values())
    yield found
    seconds = max(time.perf_counter() - started, 1e-9)
    busy, mine = _busy_seconds() - busy, sum(family(os.getpid()).values()) - mine
    found.mine, found.others = mine / seconds, max(0.0, busy - mine) / seconds


# ---------------------------------------------------------------- engines


@dataclass
class Command:
    """The command that starts an engine. ``environment`` is added to this process's environment."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Engine(ABC):
    """A running engine, used as a context manager. Its output goes to ``log``."""

    def __init__(self, name: str, command: Command, log: Path, timeout_s: float) -> None:
        self.name, self.log = name, log
        self.about: dict[str, Any] = {}
        self.command, self._timeout_s = command, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def begin(self) -> None:
        """Restart the engine's timeout."""
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 1."""
        return max(1.0, self._deadline - time.monotonic())

    def __enter__(self) -> Self:
        self.begin()
        with self.log.open("w") as log:
            self._child = subprocess.Popen(
                self.command.words,
                stdin=subprocess.PIPE,
                stdout=self._stdout(log),
                stderr=log,
                env=os.environ | self.command.environment,
                text=True,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Generate all prompts at once, greedy, with exactly ``max_tokens`` tokens each. Returns the seconds.

        Raises:
            EngineError: The engine failed, exceeded its timeout, or returned an answer with another length.
        """

    @abstractmethod
    def _stdout(self, log: IO[str]) -> Any: ...

    @abstractmethod
    def _await_ready(self) -> None: ...

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> None:
        """Ask the engine to exit, then kill its remaining processes."""
        members = set(family(self.pid)) - {self.pid}
        self._ask_to_end()
        deadline = time.monotonic() + _STOP_S
        while self._child.poll() is None and time.monotonic() < deadline:
            members |= set(family(self.pid)) - {self.pid}
            time.sleep(_POLL_S)
        for pid in [*members & set(family(os.getpid())), *([self.pid] if self._child.poll() is None else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()
        _reap()

    def _ask_to_end(self) -> None:
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        if self._child.poll() is None:
            self._child.terminate()

    def _failed(self, what: str) -> EngineError:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return EngineError(f"{what}; {self.log}: {lines[-1][:200] if lines else 'empty'}")


def _reap() -> None:
    """Collect adopted children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def check_lengths(tokens: Sequence[int], wanted: int) -> None:
    """Check that every answer has ``wanted`` tokens. Otherwise its time is meaningless.

    Raises:
        EngineError: An answer has another length.
    """
    wrong = [count for count in tokens if count != wanted]
    if wrong or not tokens:
        raise EngineError(f"{len(wrong)} of {len(tokens)} answers have other lengths than {wanted}: {wrong[:4]}")


class RunnerEngine(Engine):
    """runner.py in a peer's interpreter, connected by pipes."""

    def _stdout(self, log: IO[str]) -> int:
        return subprocess.PIPE

    def _await_ready(self) -> None:
        self.about = self._reply()["about"]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds as measured in the runner."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed(f"{self.name} has ended") from error
        reply = self._reply()
        if "error" in reply:
            raise EngineError(f"{self.name}: {reply['error']}")
        check_lengths(reply["tokens"], max_tokens)
        return float(reply["seconds"])

    def _reply(self) -> dict[str, Any]:
        line = self._read_line()
        if not line:
            raise self._failed(f"{self.name} has ended, or took longer than {self._timeout_s:g} s")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read_line(self) -> str:
        """Read a line. An alarm stops an engine that does not answer."""
        assert self._child.stdout is not None
        previous = signal.signal(signal.SIGALRM, lambda *_: self._child.kill())
        signal.setitimer(signal.ITIMER_REAL, self.left_s)
        try:
            return self._child.stdout.readline()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)


class ServerEngine(Engine):
    """An OpenAI-compatible server, ready when /health answers 200."""

    def __init__(self, name: str, command: Command, log: Path, timeout_s: float, url: str, model: str) -> None:
        super().__init__(name, command, log, timeout_s)
        self.url, self.model = url, model

    def _stdout(self, log: IO[str]) -> IO[str]:
        return log

    def _await_ready(self) -> None:
        while time.monotonic() < self._deadline:
            if self._child.poll() is not None:
                raise self._failed(f"{self.name} has ended with {self._child.returncode}")
            if self._is_up():
                return
            time.sleep(_POLL_S)
        raise self._failed(f"{self.name} was not up after {self._timeout_s:g} s")

    def _is_up(self) -> bool:
        with suppress(URLError, OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Generate over HTTP without streaming."""
        started = time.perf_counter()
        tokens = asyncio.run(self._generate(prompts, max_tokens))
        seconds = time.perf_counter() - started
        check_lengths(tokens, max_tokens)
        return seconds

    async def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        timeout = aiohttp.ClientTimeout(total=self.left_s)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            return list(await asyncio.gather(*(self._ask(session, prompt, max_tokens) for prompt in prompts)))

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> int:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise EngineError(f"{self.name}: {response.status} {(await response.text())[:200]}")
                return int((await response.json())["usage"]["completion_tokens"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self.name}: {error!r}") from error


class AnsweringServer(ServerEngine):
    """A server that is ready when it answers a completion, because its /health does not depend on the model."""

    def _is_up(self) -> bool:
        with suppress(EngineError):
            self.generate([[1, 2, 3]], 1)
            return True
        return False

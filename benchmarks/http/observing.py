"""The cost of observability: tokens per second with timelines and metrics, and with null objects in their place.

    python -m benchmarks.http.observing [--streams 64] [--pairs 4] [--rounds 3] [--requests 256] [--max-tokens 128]

Two servers of the embedded model run in separate processes and differ in nothing else. They are loaded alternately, and
the other server is stopped meanwhile. The memory layout of a process makes it faster or slower for its whole life, so
several pairs of servers are measured.

With observability, the server keeps records of requests and of engine events. Its series of /metrics are shared with
the replicas' state every second, read over HTTP by this program every 5 s, and copied to Ray's gauges every 5 s (to a
gauge that discards them). Engine, worker and ingress share one process here, so each of them delays the others. In Ray
the cost is at most as high. On a shared machine, use the CPU time per token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import aiohttp

from benchmarks.rows import Report, parser, quantile
from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor, engine_core
from raylm.engine.timelines.observer import EventRecorder, Observer
from raylm.frontend import AsyncLLM, LocalEngineClient, StateClient, async_llm, request
from raylm.frontend.state.application_state import ApplicationState
from raylm.frontend.state.client import LocalState
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.timelines.record import Part, Record
from raylm.frontend.timelines.ring import Timelines
from raylm.ingress import build_asgi_app
from raylm.ingress.ray_metrics import RayMetrics
from raylm.ingress.routes import Surroundings
from raylm.messages import EngineInfo
from tests.ingress.harness import served

ROOT = Path(__file__).parents[2]
UNITS = {
    "observed": "tok/s", "not": "tok/s", "cost": "%",
    "CPU observed": "µs/token", "CPU not": "µs/token", "CPU cost": "%",
}  # fmt: skip
SCRAPE_S = 5.0
CONFIG = {
    "cache": {"num_blocks": 4096},
    "engine": {"executor": "local", "threads": 1},
    "scheduler": {"max_num_seqs": 256},
}


class NoRecorder(Observer):
    """Replaces the EventRecorder and records nothing."""

    def __init__(self, emit: object) -> None: ...

    def request(self, *args: object) -> None: ...


class NoRecord(Record):
    __slots__ = ()

    def mark(self, phase: str) -> None: ...

    def sending(self, send: Any) -> Any:
        return send

    def wrote(self, before: float) -> None: ...


class NoPart(Part):
    __slots__ = ()

    def mark(self, phase: str) -> None: ...

    def on_open(self, request: object, drawn: object) -> None: ...

    def on_sent(self, engine_id: str, scores: object) -> None: ...

    def note(self, event: object) -> None: ...


class NoTimelines(Timelines):
    def begin(self, record: Record) -> None: ...

    def end_record(self, record: Record, error: BaseException | None = None) -> None: ...

    @contextmanager
    def part(self, current: Record | None, request_id: str, model: str) -> Iterator[Part]:
        yield NoPart(request_id)


class NoTelemetry(Telemetry):
    def tokens(self, count: int, seconds: float, *, first: bool) -> None: ...

    def finished(self, reason: str, seconds: float) -> None: ...


class NoGauge:
    def __init__(self, *args: object) -> None: ...

    def set(self, value: float, tags: dict[str, str]) -> None: ...


async def serve(observed: bool) -> None:
    """Serve until the process is killed. Prints the URL."""
    if not observed:
        engine_core.EventRecorder = NoRecorder  # type: ignore[misc,assignment]
        async_llm.Timelines, async_llm.Telemetry = NoTimelines, NoTelemetry  # type: ignore[misc]
        request.Record = NoRecord  # type: ignore[misc]
    config = Config.model_validate(CONFIG)
    core, llm = EngineCore(config, LocalExecutor(config)), AsyncLLM(config)
    state = StateClient(LocalState(ApplicationState()))
    expected = (EventRecorder, Timelines) if observed else (NoRecorder, NoTimelines)
    assert (type(core._observer), type(llm.timelines)) == expected
    worker = await core.start()
    tasks = [asyncio.create_task(core.run())]
    llm.add_engine(LocalEngineClient(core, EngineInfo("local", worker.max_model_len, worker)))
    app = build_asgi_app(llm, config, None, Surroundings(state=state))
    if observed:
        state.start()
        tasks.append(asyncio.create_task(RayMetrics("default", state.series_for_all, NoGauge).run()))
    gc.freeze()
    async with served(app) as url:
        print(url, flush=True)
        await asyncio.gather(*tasks)


class Server:
    """A process that is stopped except while it is measured."""

    def __init__(self, observed: bool) -> None:
        self.observed = observed
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http.observing", "--serve", "observed" if observed else "not"],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise SystemExit("the server did not start")
        self.signal(signal.SIGSTOP)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


async def load(server: Server, streams: int, requests: int, max_tokens: int) -> float:
    """Tokens per second received by clients."""
    todo = iter(range(requests))
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def stream() -> int:
            tokens = 0
            for number in todo:
                body = {
                    "prompt": f"The number {number} is", "max_tokens": max_tokens, "temperature": 0, "stream": True,
                    "ignore_eos": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                    lines = [line async for line in answer.content if line.startswith(b"data: {")]
                tokens += json.loads(lines[-1][6:])["usage"]["completion_tokens"]
            return tokens

        async def scrape() -> None:
            while True:
                await asyncio.sleep(SCRAPE_S)
                async with session.get(f"{server.url}/metrics") as answer:
                    await answer.read()

        reader = asyncio.create_task(scrape()) if server.observed else None
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(stream() for _ in range(streams))))
        seconds = time.perf_counter() - began
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
    assert tokens == requests * max_tokens
    return tokens / seconds


def measure(server: Server, args: argparse.Namespace, requests: int) -> tuple[float, float]:
    """Tokens per second, and microseconds of CPU time per token."""
    server.signal(signal.SIGCONT)
    before = server.cpu_s
    try:
        pace = asyncio.run(load(server, args.streams, requests, args.max_tokens))
    finally:
        server.signal(signal.SIGSTOP)
    return pace, 1e6 * (server.cpu_s - before) / (requests * args.max_tokens)


def costs(args: argparse.Namespace) -> None:
    report, found = Report("observing", UNITS, args.out), []
    for pair in range(args.pairs):
        with ExitStack() as stack:
            servers = [stack.enter_context(Server(observed)) for observed in (pair % 2 == 0, pair % 2 == 1)]
            for server in servers:
                measure(server, args, args.streams)  # warm-up
            for number in range(args.rounds):
                turn = servers if number % 2 == 0 else servers[::-1]
                measured = {server.observed: measure(server, args, args.requests) for server in turn}
                (pace, cpu), (pace_not, cpu_not) = measured[True], measured[False]
                found.append((100 * (1 - pace / pace_not), 100 * (cpu / cpu_not - 1)))
                values = (pace, pace_not, found[-1][0], cpu, cpu_not, found[-1][1])
                report.add(f"{args.streams} streams", dict(zip(UNITS, values, strict=True)), f"pair {pair}")
    for name, column in zip(("tokens/s", "CPU a token"), zip(*found, strict=True), strict=True):
        low, middle, high = (quantile(column, q) for q in (0.25, 0.5, 0.75))
        print(f"cost in {name}: median {middle:.2f} %, quartiles {low:.2f} to {high:.2f}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--pairs", type=int, default=4, help="of servers, one after the other")
    options.add_argument("--rounds", type=int, default=3, help="of a pair")
    options.add_argument("--requests", type=int, default=256, help="of a server in a round")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--serve", choices=("observed", "not"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve == "observed"))
        return
    costs(args)


if __name__ == "__main__":
    main()

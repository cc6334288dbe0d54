"""The longest time for which one request blocks the event loop of an ingress replica.

    python -m benchmarks.http.event_loop             # all cases
    python -m benchmarks.http.event_loop --only chat

The HTTP app and AsyncLLM are the real ones, with the embedded model's tokenizer and template and a context of 131,072
tokens. The engine answers at once with arbitrary tokens, so the front end's own work is measured. A task sleeps for a
millisecond repeatedly. The delay of its wake-up is the time that any other request would have to wait. The bodies are
sent by curl, a separate process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import uvicorn

from benchmarks.http.event_loop_cases import Body, chosen
from benchmarks.rows import Report, parser
from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import EngineDiedError
from raylm.frontend import AsyncLLM
from raylm.frontend.engines.engine_client import EngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    EngineStats,
    Logprobs,
    LoRAAdapter,
    WorkerInfo,
)

CONTEXT = 131_072
VOCAB_SIZE: int = resolve("embedded").config["vocab_size"]
WIDTH = 256
BEAT_S = 0.001


class InstantEngine(EngineClient):
    """Answers with tokens 300, 301, … in steps of one token per sequence, or with a vector, without delay."""

    def __init__(self, vocab_size: int) -> None:
        worker = WorkerInfo(64, 16, CONTEXT, vocab_size, "cpu", "float32", "cpu", 1, 0, 0)
        self.info = EngineInfo("instant", CONTEXT, worker)
        self._answers: asyncio.Queue[Iterator[EngineCoreOutputs]] = asyncio.Queue()

    def add(self, request: EngineCoreRequest) -> None:
        self._answers.put_nowait(_steps(request))

    def abort(self, keys: list[int]) -> None:
        """Nothing to abort."""

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """Nothing to stop."""

    def watch_blocks(self) -> None:
        """No cache."""

    async def take_parked(self, request: EngineCoreRequest) -> None:
        """Nothing is parked."""

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """No model."""

    async def unload_adapter(self, name: str) -> None:
        """No model."""

    async def snapshot(self) -> EngineSnapshot:
        raise EngineDiedError("Nothing is held here.")

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            answer = await self._answers.get()
            if (step := next(answer, None)) is not None:
                self._answers.put_nowait(answer)
                yield step
                del step  # an object that waits for the next answer would keep memory of this one from the system
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Nothing to close."""


def _steps(request: EngineCoreRequest) -> Iterator[EngineCoreOutputs]:
    """The steps of an answer. Each is made when it is sent, so that an answer takes no memory of the engine."""
    if request.pooling is not None:
        yield _vector(request.key)
        return
    params, last = request.params, (request.params.max_tokens or 16) - 1
    for number in range(last + 1):
        step = _step(request.key, params.n, number, number == last, params.logprobs)
        if number == 0 and params.prompt_logprobs is not None:
            logprobs = _logprobs(len(request.prompt_token_ids) - 1, params.prompt_logprobs)
            step.prompt_logprobs.append((request.key, logprobs))
        yield replace(step, created=time.time())


def _step(key: int, n: int, step: int, last: bool, num_logprobs: int | None) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        keys=[key] * n,
        indexes=list(range(n)),
        token_counts=[1] * n,
        token_ids=[300 + step % 2000] * n,
        finish_reasons=["length" if last else None] * n,
        stop_reasons=[None] * n,
        cached_tokens=[0] * n,
        stats=EngineStats(),
        logprobs=None if num_logprobs is None else _logprobs(n, num_logprobs),
    )


def _vector(key: int) -> EngineCoreOutputs:
    vector = bytes(4 * WIDTH - 4) + b"\0\0\x80?"  # float32: zeros and a one
    return EngineCoreOutputs([], [], [], [], [], [], [], EngineStats(), pooled=[(key, vector)])


@cache
def _logprobs(count: int, top: int) -> Logprobs:
    width = top + 1
    return Logprobs([width] * count, list(range(300, 300 + width)) * count, [-1.5] * (width * count), [1] * count)


class LatenessProbe:
    """Sleeps repeatedly, and records its longest delay in seconds."""

    def __init__(self) -> None:
        self.latest = 0.0

    async def run(self) -> None:
        while True:
            wanted = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.latest = max(self.latest, time.perf_counter() - wanted)


async def send(url: str, path: Path) -> tuple[int, float]:
    """Send the body in a file with curl. Returns the status and the seconds."""
    command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", "Expect:"]
    command += ["-H", "Content-Type: application/json", "--data-binary", f"@{path}", url]
    begun = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return int(out), time.perf_counter() - begun


async def run(only: str, rounds: int, out: Path | None) -> tuple[float, bool]:
    """Send every case ``rounds`` times.

    Returns the largest of the cases' least delays, and whether each case had its expected status.
    """
    report = Report("event_loop", {"body": "MB", "time": "s", "longest block": "ms"}, out)
    worst, right, probe = 0.0, True, LatenessProbe()
    async with front_end() as url:
        probing = asyncio.create_task(probe.run())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "body"
            for name, route, case in chosen(only):
                write(case.make(), path)
                late, seconds, statuses = await measure(probe, url + route, path, rounds)
                worst, right = max(worst, late), right and statuses == {case.status}
                figures = {"body": path.stat().st_size / 1e6, "time": seconds, "longest block": 1e3 * late}
                wrong = "" if statuses == {case.status} else f", must be {case.status}"
                report.add(name, figures, f"status {', '.join(map(str, sorted(statuses)))}{wrong}")
        probing.cancel()
    return worst, right


@asynccontextmanager
async def front_end(engine: InstantEngine | None = None) -> AsyncIterator[str]:
    """The app, served by uvicorn on this loop. Yields its URL."""
    config = Config.model_validate({"model": "embedded", "max_model_len": CONTEXT})
    llm = AsyncLLM(config)
    llm.add_engine(engine or InstantEngine(VOCAB_SIZE))
    gc.collect()
    gc.freeze()  # as the ingress does
    server = uvicorn.Server(uvicorn.Config(build_asgi_app(llm, config), port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        await llm.stop()


def write(body: Body, path: Path) -> None:
    path.write_text(body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False))


async def measure(probe: LatenessProbe, url: str, path: Path, rounds: int) -> tuple[float, float, set[int]]:
    """Send a body repeatedly. Returns the least of the longest delays, seconds of the last answer, and the statuses."""
    lates, statuses, seconds = [], set(), 0.0
    for _ in range(rounds):
        await asyncio.sleep(0.3)
        probe.latest = 0.0
        status, seconds = await send(url, path)
        lates.append(probe.latest)
        statuses.add(status)
    return min(lates), seconds, statuses


def main() -> int:
    """Print a line for each case. The exit status is 1 if a case had an unexpected status."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cases whose name holds this")
    options.add_argument("--rounds", type=int, default=3, help="times that each is sent; the best one counts")
    args = options.parse_args()
    worst, right = asyncio.run(run(args.only, args.rounds, args.out))
    print(f"the longest: {1e3 * worst:.1f} ms")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

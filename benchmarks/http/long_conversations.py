"""The cost of a turn of a coding agent's session before the engine gets it: 60 turns, 14,000 to 60,000 tokens.

    python -m benchmarks.http.long_conversations
    python -m benchmarks.http.long_conversations --only chat --turns 30
    python -m benchmarks.http.long_conversations --kept 0    # keeps no token ids of earlier turns

Each turn arrives at one of two ingresses at random, which share two engines. The HTTP apps, AsyncLLM, Router,
EngineCore and KV cache are the real ones, in this process, with the embedded model's tokenizer and template. The
workers compute nothing and answer at once. "ms" is the time from the whole body to the call that sends the request to
the engine, the median of the turns in that part of the session. "CPU" is the CPU time of this process, including the
HTTP client, and of the process that renders the template. "hit" is the share of the prompts' tokens that the engines
had cached.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.http.event_loop import CONTEXT, VOCAB_SIZE
from benchmarks.rows import Report, parser, quantile
from raylm.config import Config
from raylm.engine import EngineCore
from raylm.frontend import AsyncLLM, LocalEngineClient
from raylm.frontend.text import turn_tokens
from raylm.ingress import build_asgi_app
from raylm.messages import EngineCoreRequest, EngineInfo, WorkerInfo
from raylm.simulate.executor import SimulatedExecutor

_FIRST_WORDS = 3_000  # words of the system message, about 14,000 tokens
_WORDS = 160  # words of a message; with its answer about 800 tokens
_SETTLE_S = 0.05  # for the engines' reports about the turn before
_BLOCK = 16
_BLOCKS = 16_384  # blocks of an engine: 262,144 tokens
_UNITS = {"tokens": "", "ms": "", "CPU": "ms", "hit": "%"}
_WINDOW = 6  # turns of a part


class Clock:
    """Measures a turn: seconds and CPU seconds from ``begin`` until an engine gets the request."""

    def __init__(self) -> None:
        self.at = self.cpu = 0.0
        self.tokens = 0
        self._children: list[Path] = []

    def begin(self) -> None:
        self._children = list(_descendants(Path("/proc/self")))
        self.at, self.cpu = time.perf_counter(), self._cpu_s()

    def note(self, request: EngineCoreRequest) -> None:
        self.at, self.cpu = time.perf_counter() - self.at, self._cpu_s() - self.cpu
        self.tokens = len(request.prompt_token_ids)

    def _cpu_s(self) -> float:
        """CPU time of this process and of its descendants, in seconds."""
        return time.process_time() + sum(_run_s(child) for child in self._children)


class ClockedClient(LocalEngineClient):
    def __init__(self, core: EngineCore, info: EngineInfo, clock: Clock) -> None:
        super().__init__(core, info)
        self._clock = clock

    def add(self, request: EngineCoreRequest) -> None:
        self._clock.note(request)
        super().add(request)


def _descendants(process: Path) -> Iterator[Path]:
    for children in process.glob("task/*/children"):
        for pid in children.read_text().split():
            yield (child := Path("/proc", pid))
            yield from _descendants(child)


def _run_s(process: Path) -> float:
    return int((process / "schedstat").read_text().split()[0]) / 1e9


Talk = list[dict[str, Any]]
Ask = Callable[[Talk, dict[str, Any]], tuple[str, dict[str, Any]]]


def _chat(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": talk, "max_tokens": 1}


def _messages(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"system": talk[0]["content"], "messages": talk[1:], "max_tokens": 1}


def _responses(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": talk, "max_output_tokens": 1, "store": False}


def _chained(talk: Talk, last: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    before = {"previous_response_id": last["id"]} if last else {}
    return "/v1/responses", {"input": talk[-1:] if last else talk, "max_output_tokens": 1} | before


CASES: dict[str, Ask] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "previous_response_id": _chained,
}


@asynccontextmanager
async def _engine(number: int) -> AsyncIterator[tuple[EngineCore, EngineInfo]]:
    worker = WorkerInfo(_BLOCKS, _BLOCK, CONTEXT, VOCAB_SIZE, "none", "none", "none", 1, 0, 0)
    core = EngineCore(Config(model="embedded"), SimulatedExecutor(worker, lambda _: 0.0, lambda _: [300]))
    info = await core.start()
    running = asyncio.create_task(core.run())
    try:
        yield core, EngineInfo(f"engine-{number}", info.max_model_len, info)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await core.shutdown()


@asynccontextmanager
async def _ingress(
    engines: list[tuple[EngineCore, EngineInfo]], store: Path, rank: int, clock: Clock
) -> AsyncIterator[httpx.AsyncClient]:
    config = Config.model_validate({"model": "embedded", "ingress": {"store": str(store)}})
    llm = AsyncLLM(config, rank=rank)
    for core, info in engines:
        llm.add_engine(ClockedClient(core, info, clock))
    transport = httpx.ASGITransport(build_asgi_app(llm, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        try:
            yield client
        finally:
            await llm.stop()


@asynccontextmanager
async def _served(clock: Clock) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of two ingresses."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "responses.db")
        async with _engine(0) as first, _engine(1) as second:
            engines = [first, second]
            async with _ingress(engines, store, 0, clock) as one, _ingress(engines, store, 1, clock) as other:
                yield [one, other]


async def _talk(ask: Ask, turns: int) -> list[tuple[float, float, float, float]]:
    """(tokens, milliseconds, milliseconds of CPU, share of cached tokens) of each turn."""
    words, last, found = random.Random(7), {}, []
    vocabulary = ["".join(words.choices("abcdefghijklmnoprstuvwz", k=words.randint(2, 9))) for _ in range(2000)]
    talk: Talk = [{"role": "system", "content": " ".join(words.choices(vocabulary, k=_FIRST_WORDS))}]
    clock = Clock()
    async with _served(clock) as clients:
        for _ in range(turns):
            talk.append({"role": "user", "content": " ".join(words.choices(vocabulary, k=_WORDS))})
            path, body = ask(talk, last)
            client = words.choice(clients)
            request = client.build_request("POST", path, json={"model": "embedded"} | body)
            await asyncio.sleep(_SETTLE_S)
            clock.begin()
            answer = await client.send(request)
            answer.raise_for_status()
            last = answer.json()
            share = 100 * _cached(last["usage"]) / clock.tokens
            found.append((clock.tokens, 1000 * clock.at, 1000 * clock.cpu, share))
            talk.append({"role": "assistant", "content": " ".join(words.choices(vocabulary, k=40))})
    return found


def _cached(usage: dict[str, Any]) -> int:
    """The number of cached tokens, in any of the three APIs' forms."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])


async def _run(only: str | None, turns: int, report: Report) -> None:
    for name, ask in CASES.items():
        if only not in (None, name):
            continue
        found = await _talk(ask, turns)
        for begin in (2, (turns - _WINDOW) // 2, turns - _WINDOW):
            part = found[begin : begin + _WINDOW]
            columns = [quantile([turn[column] for turn in part], 0.5) for column in range(4)]
            report.add(f"{name}, turns {begin + 1} to {begin + len(part)}", dict(zip(_UNITS, columns, strict=True)))
        tokens = sum(turn[0] for turn in found)
        report.add(f"{name}, all turns", {"hit": sum(turn[0] * turn[3] for turn in found) / tokens})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=CASES)
    options.add_argument("--turns", type=int, default=60)
    options.add_argument("--kept", type=int, default=turn_tokens.MAX_BYTES, help="bytes of kept token ids")
    given = options.parse_args()
    turn_tokens.MAX_BYTES = given.kept
    asyncio.run(_run(given.only, given.turns, Report("long_conversations", _UNITS, given.out)))


if __name__ == "__main__":
    main()

"""What a turn of a long conversation costs before the engine has it: 60 turns, each about 1,000 tokens longer.

    python -m benchmarks.http.long_conversations
    python -m benchmarks.http.long_conversations --only chat --turns 30

The HTTP app and AsyncLLM are the real ones, in this process, with the embedded model's tokenizer and template; the
engine answers at once. "ms" is from the arrival of the whole body to the call that hands the request to the engine, the
median of the turns of that part of the conversation. "prefix" is the share of the prompt's blocks of 16 tokens that the
turn before had too, which an unbounded prefix cache would have.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any

import httpx

from benchmarks.http.event_loop import VOCAB_SIZE, InstantEngine
from benchmarks.rows import Report, parser, quantile
from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.messages import EngineCoreRequest

_WORDS = 220  # of a message, about 1,000 tokens
_BLOCK = 16
_UNITS = {"tokens": "", "ms": "", "of them CPU": "", "prefix": "%"}
_WINDOW = 6  # turns


class ClockedEngine(InstantEngine):
    """Notes when a request arrives, and its prompt."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.at = self.cpu = 0.0
        self.prompt: list[int] = []

    def add(self, request: EngineCoreRequest) -> None:
        self.at, self.cpu, self.prompt = time.perf_counter(), time.process_time(), list(request.prompt_token_ids)
        super().add(request)


Talk = list[dict[str, Any]]
Ask = Callable[[Talk, dict[str, Any]], tuple[str, dict[str, Any]]]


def _chat(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": talk, "max_tokens": 1}


def _messages(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": talk, "max_tokens": 1}


def _responses(talk: Talk, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": talk, "max_output_tokens": 1, "store": False}


def _chained(talk: Talk, last: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    before = {"previous_response_id": last["id"]} if last else {}
    return "/v1/responses", {"input": talk[-1:], "max_output_tokens": 1} | before


CASES: dict[str, Ask] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "previous_response_id": _chained,
}


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[ClockedEngine, httpx.AsyncClient]]:
    config = Config.model_validate({"model": "embedded", "ingress": {"store": ":memory:"}})
    llm, engine = AsyncLLM(config), ClockedEngine()
    llm.add_engine(engine)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_asgi_app(llm, config)), base_url="http://localhost", timeout=600
    ) as client:
        try:
            yield engine, client
        finally:
            await llm.stop()


async def _talk(ask: Ask, turns: int) -> list[tuple[float, float, float, float]]:
    """(tokens, milliseconds, milliseconds of CPU, share of the prefix) of each turn."""
    words, talk, last, found = random.Random(7), Talk(), {}, []
    vocabulary = ["".join(words.choices("abcdefghijklmnoprstuvwz", k=words.randint(2, 9))) for _ in range(2000)]
    before: list[int] = []
    async with _served() as (engine, client):
        for _ in range(turns):
            talk.append({"role": "user", "content": " ".join(words.choices(vocabulary, k=_WORDS))})
            path, body = ask(talk, last)
            request = client.build_request("POST", path, json={"model": "embedded"} | body)
            begun, cpu = time.perf_counter(), time.process_time()
            answer = await client.send(request)
            answer.raise_for_status()
            last = answer.json()
            shared = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, engine.prompt, strict=False))
            )
            before = engine.prompt
            share = 100 * (shared // _BLOCK * _BLOCK) / len(before)
            found.append((len(before), 1000 * (engine.at - begun), 1000 * (engine.cpu - cpu), share))
            talk.append({"role": "assistant", "content": " ".join(words.choices(vocabulary, k=40))})
    return found


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
        report.add(f"{name}, all turns", {"prefix": sum(turn[0] * turn[3] for turn in found) / tokens})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=CASES)
    options.add_argument("--turns", type=int, default=60)
    given = options.parse_args()
    asyncio.run(_run(given.only, given.turns, Report("long conversations", _UNITS, given.out)))


if __name__ == "__main__":
    main()

"""Runs the loads of one `raylm bench`, one after another, against one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from raylm.bench.loops import closed_loop, open_loop, poisson
from raylm.bench.prompts import PromptSettings, Question, Scale, drawn, sessions, tools, traced, words
from raylm.bench.report import LoadResult
from raylm.client import Answer, Connection, ServerError, ask
from raylm.config import Frozen
from raylm.errors import ConfigError
from raylm.simulate import TraceLine

Progress = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OPEN_S = 20.0
_SHORT, _LONG = 32, 160  # words of the prompts that measure the server's tokens for a word


class BenchSettings(Frozen):
    """Parameters besides prompts. Loads are closed loops unless rates or a trace are given."""

    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    concurrency: tuple[int, ...] = (1, 8, 32)
    rates: tuple[float, ...] = ()
    requests: int | None = Field(None, ge=1)
    speed: float = Field(1.0, gt=0)
    ignore_eos: bool = True
    warm_up: int = Field(4, ge=1)
    body: dict[str, Any] = Field(default_factory=dict)

    def questions_of(self, default: int) -> int:
        return self.requests or default


def body_of(question: Question, settings: BenchSettings, prompts: PromptSettings) -> dict[str, Any]:
    """The body of a request: streamed, with usage, and greedy unless ``settings.body`` changes it."""
    text: Any = list(question.prompt)
    if not (text and isinstance(text[0], int)):
        text = " ".join(text)
    asked = {"prompt": text} if settings.endpoint == "completions" else {"messages": [_user(text)]}
    exact = {"ignore_eos": True} if settings.ignore_eos and not prompts.tools else {}
    given = {"tools": tools(prompts.tools), "tool_choice": prompts.tool_choice} if prompts.tools else {}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    lengths = {"max_tokens": question.output_tokens, "temperature": 0}
    return {"model": settings.model} | asked | lengths | exact | given | settings.body | streamed


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Bench:
    """Sends requests to one server. ``scale`` is known after ``warm_up``."""

    def __init__(self, connection: Connection, settings: BenchSettings, prompts: PromptSettings) -> None:
        self._connection, self._settings, self._prompts = connection, settings, prompts
        self.scale = Scale()

    async def warm_up(self) -> None:
        """Send a few requests, and compute the tokens of a word from their usage.

        Raises ServerError if one of the first fails.
        """
        short, long = await asyncio.gather(*(self._ask(self._warming(at, n)) for at, n in enumerate((_SHORT, _LONG))))
        for answer in (short, long):
            if answer.error is not None:
                raise ServerError(answer.kind, answer.error)
        per_word = max(0.1, (long.prompt_tokens - short.prompt_tokens) / (_LONG - _SHORT))
        self.scale = Scale(per_word, short.prompt_tokens - _SHORT * per_word)
        await asyncio.gather(*(self._ask(self._warming(at, _LONG)) for at in range(2, self._settings.warm_up)))

    def _warming(self, number: int, length: int) -> Question:
        return Question(words(f"warm {self._prompts.seed} {number}", length), self._prompts.output_tokens[0])

    async def _ask(self, question: Question) -> Answer:
        body = body_of(question, self._settings, self._prompts)
        exact = question.output_tokens if body.get("ignore_eos") else None
        return await ask(self._connection, _PATHS[self._settings.endpoint], body, exact)

    def _asks(
        self, questions: Sequence[Question], asked: list[tuple[Question, Answer]]
    ) -> list[Callable[[], Awaitable[Answer]]]:
        async def one(question: Question) -> Answer:
            answer = await self._ask(question)
            asked.append((question, answer))
            return answer

        return [partial(one, question) for question in questions]

    async def _session(
        self, questions: Sequence[Question], asked: list[tuple[Question, Answer]], ended: Callable[[], object]
    ) -> None:
        """Send the questions of one session, each after the answer to the one before it and a pause."""
        for turn, question in enumerate(questions):
            await asyncio.sleep(question.think_s if turn else 0.0)
            asked.append((question, await self._ask(question)))
            ended()

    async def load(
        self, name: str, questions: Sequence[Question], concurrency: int | None, progress: Progress
    ) -> LoadResult:
        """Run one load: a closed loop of ``concurrency``, or each question at its time.

        Of a session the first question has a time, and a later one is sent after the answer before it.
        """
        asked: list[tuple[Question, Answer]] = []
        begun, late = time.perf_counter(), [0.0]
        with progress(name, len(questions)) as ended:
            if concurrency is not None:
                await closed_loop(self._asks(questions, asked), concurrency, ended)
            else:
                turns = sessions(questions)
                asks = [partial(self._session, one, asked, ended) for one in turns]
                _, late = await open_loop(asks, [one[0].at for one in turns], lambda: None)
        return LoadResult(name, time.perf_counter() - begun, asked, max(late), self.scale)


async def run_all(
    connection: Connection,
    settings: BenchSettings,
    prompts: PromptSettings,
    trace: Sequence[TraceLine],
    progress: Progress,
    report: Callable[[LoadResult], object],
) -> None:
    """Warm up, then run each load. ``report`` is called with each load that ends.

    Raises:
        ServerError: the server does not answer requests.
        ConfigError: the endpoint does not support the trace.
    """
    if settings.endpoint == "chat" and any(line.prompt is not None for line in trace):
        raise ConfigError("--endpoint: chat takes no token ids, which the trace has; use completions.")
    bench = Bench(connection, settings, prompts)
    await bench.warm_up()
    if trace:
        questions = traced(trace[: settings.requests], bench.scale, settings.speed)
        report(await bench.load("trace", questions, None, progress))
        return
    for number, rate in enumerate(settings.rates):
        count = settings.questions_of(max(8, int(_OPEN_S * rate)))
        times = poisson(rate, count, prompts.seed + number)
        fresh = islice(drawn(prompts, bench.scale, number), count)
        timed = [Question(one.prompt, one.output_tokens, at) for one, at in zip(fresh, times, strict=True)]
        report(await bench.load(f"rate {rate:g}/s", timed, None, progress))
    for number, clients in enumerate(() if settings.rates else settings.concurrency):
        count = settings.questions_of(max(4, 3 * clients))
        fresh = islice(drawn(prompts, bench.scale, number), count)
        report(await bench.load(f"concurrency {clients}", list(fresh), clients, progress))

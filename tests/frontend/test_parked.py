"""Streams that continue through another front end, from tokens that an engine parked for a lost one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from raylm.config import CacheConfig, Config
from raylm.engine import EngineCore, parking
from raylm.engine.parking import PERIOD_S
from raylm.errors import EngineDiedError
from raylm.frontend import AsyncLLM, LocalEngineClient, RequestHead, RequestOutput
from raylm.messages import EngineCoreRequest, EngineInfo
from raylm.params import SamplingParams
from tests.fakes import FakeExecutor, FakeWorker
from tests.frontend.test_with_engine_core import until

NAME = "a stream"
LENGTH = 60


class Client(LocalEngineClient):
    """A client that can be lost without a message, like a killed process."""

    silent = False

    def lose(self) -> None:
        self._core.drop_client(self._client_id, self._outbox)

    async def take_parked(self, request: Any) -> Any:
        if self.silent:
            raise EngineDiedError("It is gone.")
        return await super().take_parked(request)


class Fleet:
    """Two engines and two front ends. ``clients`` are the engine clients of each front end."""

    def __init__(self, checkpoint: Path) -> None:
        config = Config(model=str(checkpoint), served_model_name="fake")
        self.llms = [AsyncLLM(config) for _ in range(2)]
        workers = [FakeWorker(num_blocks=96, max_model_len=200) for _ in range(2)]
        self.workers = workers
        core_config = Config(cache=CacheConfig(num_blocks=96))
        self.cores = [EngineCore(core_config, FakeExecutor(worker)) for worker in workers]
        self.runs: list[asyncio.Task[None]] = []
        self.clients: list[list[Client]] = []

    async def open(self) -> None:
        infos = [EngineInfo(f"e{place}", 200, await core.start()) for place, core in enumerate(self.cores)]
        self.runs = [asyncio.create_task(core.run()) for core in self.cores]
        for llm in self.llms:
            self.clients.append([Client(core, info) for core, info in zip(self.cores, infos, strict=True)])
            for client in self.clients[-1]:
                llm.add_engine(client)

    async def close(self) -> None:
        for task in self.runs:
            task.cancel()
        await asyncio.gather(*self.runs, return_exceptions=True)
        for llm in self.llms:
            await llm.stop()
        for core in self.cores:
            await core.shutdown()

    @property
    def num_parked(self) -> int:
        return sum(len(core.scheduler.parking) for core in self.cores)

    @property
    def is_idle(self) -> bool:
        return not any(core.scheduler.has_work for core in self.cores)


@pytest.fixture
async def fleet(checkpoint: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(checkpoint)
    await fleet.open()
    yield fleet
    await fleet.close()


class Answer:
    """The tokens, texts and ends that a caller has of each sequence."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.ends: list[Any] = [None] * n

    def take(self, output: RequestOutput) -> None:
        for delta in output.deltas:
            if not delta.told:
                self.tokens[delta.index] += delta.token_ids
                self.texts[delta.index] += delta.text
                self.ends[delta.index] = (delta.finish_reason, delta.stop_reason)

    @property
    def told(self) -> tuple[int | None, ...]:
        return tuple(
            None if end is not None and end[0] else len(tokens)
            for tokens, end in zip(self.tokens, self.ends, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


async def read(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams, answer: Answer, most: int = 10**6, **head: Any
) -> None:
    """Read outputs into ``answer``, and leave after ``most`` tokens."""
    async with aclosing(llm.generate(prompt, params, RequestHead(request_id="r", **head))) as outputs:
        async for output in outputs:
            answer.take(output)
            if sum(map(len, answer.tokens)) >= most:
                return


async def lost_after(fleet: Fleet, prompt: list[int], params: SamplingParams, most: int) -> Answer:
    """A caller's answer when the first front end is lost without a message. Its engine does not know it yet."""
    answer, stuck = Answer(params.n), asyncio.Event()

    async def stop_reading() -> None:
        async with aclosing(
            fleet.llms[0].generate(prompt, params, RequestHead(request_id="r", resumable_as=NAME))
        ) as outputs:
            async for output in outputs:
                answer.take(output)
                if sum(map(len, answer.tokens)) >= most:
                    stuck.set()
                    await asyncio.sleep(1000)
        stuck.set()

    task = asyncio.create_task(stop_reading())
    fleet.runs.append(task)
    await stuck.wait()
    return answer


PARAMS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 2, "min_tokens": 20, "ignore_eos": False},
    {"stop": ("a",)},
    {"n": 4, "stop_token_ids": (7, 8)},
    {"n": 3, "stop": ("b", "c"), "max_tokens": 40},
]


@pytest.mark.parametrize("fields", PARAMS, ids=str)
@pytest.mark.parametrize("when", ["at once", "when it is given up", "when all is drawn", "when it hung up"])
async def test_what_was_drawn_is_taken_over(fleet: Fleet, fields: dict[str, Any], when: str) -> None:
    dice = Random(f"{fields} {when}")
    for _ in range(3):
        prompt = [dice.randrange(1, 50) for _ in range(dice.randrange(1, 40))]
        params = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, "seed": dice.randrange(99)} | fields)
        undisturbed = Answer(params.n)
        await read(fleet.llms[1], prompt, params, undisturbed)
        most = dice.randrange(1, 1 + sum(map(len, undisturbed.tokens)))
        if when == "when it hung up":
            answer = Answer(params.n)
            await read(fleet.llms[0], prompt, params, answer, most, resumable_as=NAME)
            await until(lambda: fleet.is_idle)
        else:
            answer = await lost_after(fleet, prompt, params, most)
            if when == "when all is drawn":
                await until(lambda: fleet.is_idle)
            elif when != "at once":
                for client in fleet.clients[0]:
                    client.lose()
                await until(lambda: fleet.is_idle)
        drawn = answer.told
        if drawn == (None,) * params.n:
            continue
        await read(fleet.llms[1], prompt, params, answer, told=drawn, resumable_as=NAME, is_resumed=True)
        assert answer == undisturbed
        await until(lambda: fleet.is_idle)
        if when != "when it hung up":
            return  # the first front end hangs forever


async def test_nothing_is_drawn_twice(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=1)
    answer = await lost_after(fleet, [5, 6], params, 1)
    for client in fleet.clients[0]:
        client.lose()
    await until(lambda: fleet.is_idle)
    assert fleet.num_parked == 1
    generated = sum(core.scheduler.counters.generation_tokens for core in fleet.cores)
    assert 0 < generated < LENGTH, "the engine continued without a client"
    await read(fleet.llms[1], [5, 6], params, answer, told=answer.told, resumable_as=NAME, is_resumed=True)
    assert answer.tokens == [fleet.workers[0].model.continuation([5, 6], 1, LENGTH)]
    assert sum(core.scheduler.counters.generation_tokens for core in fleet.cores) == LENGTH


async def test_it_is_given_once_and_to_the_very_same_request_alone(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=1)
    other = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=2)
    for asked in (params, other):
        assert asked.seed is not None
        name, rest = f"stream {asked.seed}", Answer(1)
        await read(fleet.llms[0], [5, 6], params, Answer(1), 20, resumable_as=name)
        await until(lambda: fleet.is_idle)
        parked = [name in core.scheduler.parking._parked for core in fleet.cores]
        assert sum(parked) == 1
        await read(fleet.llms[1], [5, 6], asked, rest, told=(3,), resumable_as=name, is_resumed=True)
        assert rest.tokens == [fleet.workers[0].model.continuation([5, 6], asked.seed, LENGTH)[3:]]
        core = fleet.cores[parked.index(True)]
        first = EngineCoreRequest(1, "r", [5, 6], params, resumable_as=name)
        assert core.take_parked(first) is None, "it was already taken"


async def test_it_goes_with_time(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=1)
    await read(fleet.llms[0], [5, 6], params, Answer(1), 20, resumable_as=NAME)
    await until(lambda: fleet.is_idle)
    periods = round(Config().ingress.recovery_timeout_s / PERIOD_S)
    for left in range(periods, 0, -1):
        assert fleet.num_parked == 1, left
        for core in fleet.cores:
            core.pass_period(PERIOD_S)
    assert fleet.num_parked == 0
    await read(fleet.llms[0], [5, 6], params, whole := Answer(1), resumable_as=NAME)
    assert fleet.num_parked == 1
    for core in fleet.cores:
        for _ in range(15):
            core.pass_period(PERIOD_S)
    assert fleet.num_parked == 0, "a whole answer stays until a lost client is noticed"
    assert whole.tokens == [fleet.workers[0].model.continuation([5, 6], 1, LENGTH)]


async def test_an_engine_that_does_not_answer_has_nothing(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=1)
    await read(fleet.llms[0], [5, 6], params, answer := Answer(1), 20, resumable_as=NAME)
    await until(lambda: fleet.is_idle)
    for client in fleet.clients[1]:
        client.silent = True
    await read(fleet.llms[1], [5, 6], params, answer, told=answer.told, resumable_as=NAME, is_resumed=True)
    assert answer.tokens == [fleet.workers[0].model.continuation([5, 6], 1, LENGTH)]


async def test_what_is_open_is_given_once_and_is_not_parked_later(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=190, ignore_eos=True, seed=1)
    for core in fleet.cores:
        core._executor._delay_s = 0.002  # type: ignore[attr-defined]
    await lost_after(fleet, [5, 6], params, 1)
    (core,) = [core for core in fleet.cores if core.scheduler.has_work]
    (asked,) = [opened.state.request for opened in core.scheduler.parking._open.values()]
    assert core.take_parked(replace(asked, key=99, request_id="other", arrival_time=5.0)) is not None
    assert core.scheduler.has_work
    assert core.take_parked(asked) is None
    for client in fleet.clients[0]:
        client.lose()
    await until(lambda: fleet.is_idle)
    assert fleet.num_parked == 0


async def test_the_oldest_goes_where_there_is_too_much(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "MOST_BYTES", 20_000)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=1)
    for number in range(12):
        await read(fleet.llms[0], [5, 6], params, Answer(1), 20, resumable_as=f"stream {number}")
        await until(lambda: fleet.is_idle)
    for core in fleet.cores:
        names = list(core.scheduler.parking._parked)
        assert names == sorted(names, key=lambda name: int(name.split()[1]))
        assert core.scheduler.parking.num_bytes <= 20_000
    assert 2 <= fleet.num_parked < 12
    assert any("stream 11" in core.scheduler.parking._parked for core in fleet.cores)

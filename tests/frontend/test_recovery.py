"""Requests of a lost engine continue on another engine, and their callers get the same tokens."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine.sequence import sequence_seed
from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError
from raylm.frontend import AsyncLLM, RequestHead
from raylm.messages import LoRAAdapter
from raylm.params import SamplingParams
from tests.frontend.played_engine import PlayedEngine, settle
from tests.frontend.test_with_engine_core import House, until


@pytest.fixture
async def lasting(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM whose requests wait until an engine is available."""
    llm = AsyncLLM(Config(model=str(checkpoint), served_model_name="played"), recovery_timeout_s=30)
    yield llm
    await llm.stop()


async def read(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> dict[int, list[int]]:
    """The tokens of each sequence."""
    found: dict[int, list[int]] = {index: [] for index in range(params.n)}
    async with aclosing(llm.generate(prompt, params, RequestHead(request_id="r"))) as outputs:
        async for output in outputs:
            for delta in output.deltas:
                found[delta.index] += delta.token_ids
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_answers_are_those_of_an_undisturbed_run(lasting: AsyncLLM, seed: int) -> None:
    """Engines start and end at random, and sometimes there is none."""
    numbers = random.Random(seed)
    houses = [House(lasting, f"e{at}") for at in range(7)]
    await houses[0].open()
    calls, want = [], []
    for number in range(24):
        prompt = [numbers.randrange(1, 50) for _ in range(numbers.randrange(1, 60))]
        params = SamplingParams(
            n=numbers.choice([1, 1, 3]), max_tokens=numbers.randrange(1, 80), ignore_eos=True, seed=number
        )
        calls.append(asyncio.create_task(read(lasting, prompt, params)))
        tokens = [
            houses[0].model.continuation(prompt, sequence_seed(number, index), params.max_tokens or 0)
            for index in range(params.n)
        ]
        want.append(dict(enumerate(tokens)))
    for old, new in pairwise(houses):
        await asyncio.sleep(0.01 * numbers.random())
        if numbers.random() < 0.5:
            await new.open()
            old.executor.die()
        else:
            old.executor.die()
            await until(lambda: not lasting.is_ready)
            await new.open()
    assert await asyncio.gather(*calls) == want
    await until(lambda: not houses[-1].core.scheduler.has_work)
    for house in houses:
        await house.close()


async def test_what_is_told_is_told_once_and_the_rest_is_asked_for(lasting: AsyncLLM) -> None:
    first, second = PlayedEngine("first"), PlayedEngine("second")
    lasting.add_engine(first)
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True)
    call = asyncio.create_task(read(lasting, [5, 6], params))
    await until(lambda: bool(first.added))
    key = first.added[0].key
    first.say((key, 0, [7, 8], None), (key, 1, [9], "length"), (key, 2, [10], None))
    await first.heard()
    first.die()
    await first.heard()
    lasting.add_engine(second)
    await until(lambda: bool(second.added))
    again = second.added[0]
    assert again.drawn == ((7, 8), None, (10,))
    assert again.params.seed == first.added[0].params.seed, "a default seed is drawn only once"
    second.say((again.key, 0, [11], "length"), (again.key, 2, [12], "length"))
    assert await call == {0: [7, 8, 11], 1: [9], 2: [10, 12]}


async def test_a_caller_that_has_gone_is_not_taken_along(lasting: AsyncLLM) -> None:
    first, second = PlayedEngine("first"), PlayedEngine("second")
    lasting.add_engine(first)
    call = asyncio.create_task(read(lasting, [5, 6], SamplingParams()))
    await until(lambda: bool(first.added))
    first.die()
    await until(lambda: not lasting.is_ready)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    lasting.add_engine(second)
    await settle()
    assert not second.added
    assert not lasting._router._recovery._waiting


async def test_tokens_go_on_where_they_are_the_same_and_nowhere_else(lasting: AsyncLLM) -> None:
    first, other, same = PlayedEngine("first"), PlayedEngine("other", fingerprint="fp_2"), PlayedEngine("same")
    lasting.add_engine(first)
    begun = asyncio.create_task(read(lasting, [5], SamplingParams(max_tokens=2, ignore_eos=True)))
    await until(lambda: len(first.added) == 1)
    queued = asyncio.create_task(read(lasting, [6], SamplingParams(max_tokens=2, ignore_eos=True)))
    await until(lambda: len(first.added) == 2)
    first.say((first.added[0].key, 0, [7], None))
    await first.heard()
    lasting.add_engine(other)
    first.die()
    await until(lambda: bool(other.added))
    assert [list(request.prompt_token_ids) for request in other.added] == [[6]], "this request had no token yet"
    lasting.add_engine(same)
    await until(lambda: bool(same.added))
    assert same.added[0].drawn == ((7,),)
    same.say((same.added[0].key, 0, [8], "length"))
    other.say((other.added[0].key, 0, [9, 9], "length"))
    assert await begun == {0: [7, 8]}
    assert await queued == {0: [9, 9]}


async def test_nobody_waits_longer_than_recovery_takes(checkpoint: Path) -> None:
    llm = AsyncLLM(Config(model=str(checkpoint)), recovery_timeout_s=0.05)
    engine = PlayedEngine("only")
    llm.add_engine(engine)
    call = asyncio.create_task(read(llm, [5], SamplingParams()))
    await until(lambda: bool(engine.added))
    engine.die()
    with pytest.raises(EngineDiedError, match="sending it again is safe"):
        await call
    await llm.stop()


async def test_a_request_that_brings_engines_down_is_given_up_and_its_neighbours_are_not(lasting: AsyncLLM) -> None:
    """Suspected requests run one at a time, so the innocent ones complete after the guilty one is known."""
    guilty, innocent = array("I", [66]), [[1], [2], [3]]
    deaths = 0
    lasting.add_engine(engine := PlayedEngine("e0"))
    calls = [asyncio.create_task(read(lasting, prompt, SamplingParams(max_tokens=1))) for prompt in ([66], *innocent)]
    await until(lambda: len(engine.added) == 4)
    while not calls[0].done():
        deaths += any(request.prompt_token_ids == guilty for request in engine.added)
        engine.die(EngineCrashedError("It crashed."))
        await engine.heard()
        lasting.add_engine(engine := PlayedEngine(f"e{deaths}"))
        answered: set[int] = set()
        while not any(request.prompt_token_ids == guilty for request in engine.added) and not calls[0].done():
            for request in engine.added:
                if request.key not in answered:
                    answered.add(request.key)
                    engine.say((request.key, 0, [5], "length"))
            await engine.heard()
            await settle()
    assert deaths == 3
    with pytest.raises(EngineDiedError, match="3 engines crashed"):
        await calls[0]
    while not all(call.done() for call in calls[1:]):
        for request in engine.added:
            engine.say((request.key, 0, [5], "length"))
        await engine.heard()
        await settle()
    assert [await call for call in calls[1:]] == [{0: [5]}] * 3


async def test_a_draining_engine_hands_over_what_is_open_and_is_not_heard_any_more(lasting: AsyncLLM) -> None:
    """At once, if another engine has its fingerprint and adapters.

    Otherwise the draining engine continues and gets new ones.
    """
    first, other, second = PlayedEngine("first"), PlayedEngine("other", fingerprint="fp_2"), PlayedEngine("second")
    lasting.add_engine(first)
    begun = asyncio.create_task(read(lasting, [5], SamplingParams(max_tokens=4, ignore_eos=True)))
    await until(lambda: len(first.added) == 1)
    key = first.added[0].key
    first.say((key, 0, [7], None), draining=True)
    await until(lambda: first.draining)
    late = asyncio.create_task(read(lasting, [6], SamplingParams(max_tokens=1, ignore_eos=True)))
    await until(lambda: len(first.added) == 2)
    first.say((first.added[1].key, 0, [6], "length"))
    assert await late == {0: [6]}, "there is no other engine"
    lasting.add_engine(other)
    new = [asyncio.create_task(read(lasting, [8], SamplingParams(max_tokens=1, ignore_eos=True))) for _ in range(3)]
    await until(lambda: len(first.added) + len(other.added) == 5)
    assert len(other.added) == 3, "new requests go to engines that do not drain"
    other.say(*((request.key, 0, [8], "length") for request in other.added))
    assert await asyncio.gather(*new) == [{0: [8]}] * 3
    first.say((key, 0, [9], None))
    await first.heard()
    assert not first.closed, "the other engine has another fingerprint"
    lasting.add_engine(second)
    await until(lambda: bool(second.added))
    await until(lambda: first.closed)
    assert second.added[0].drawn == ((7, 9),)
    first.say((key, 0, [1, 1], "length"))
    await settle()
    second.say((second.added[0].key, 0, [10, 11], "length"))
    assert await begun == {0: [7, 9, 10, 11]}


async def test_an_engine_with_an_adapter_is_replaced_by_one_that_has_it(lasting: AsyncLLM) -> None:
    adapter = LoRAAdapter("tuned", "/adapters/tuned")
    first, second = PlayedEngine("first"), PlayedEngine("second")
    lasting.add_engine(first)
    first.say(adapters=(adapter,))
    await until(lambda: "tuned" in lasting.adapters.known)
    lasting.add_engine(second)
    second.say(adapters=())
    await until(lambda: bool(second.loaded))
    first.say(draining=True)
    await first.heard()
    assert not first.closed
    second.say(adapters=(adapter,))
    await until(lambda: first.closed)


async def test_of_two_that_drain_together_one_goes_on(lasting: AsyncLLM) -> None:
    first, second = PlayedEngine("first"), PlayedEngine("second")
    for engine in (first, second):
        lasting.add_engine(engine)
    begun = asyncio.create_task(read(lasting, [5], SamplingParams(max_tokens=2, ignore_eos=True)))
    await until(lambda: bool(first.added or second.added))
    used, other = (first, second) if first.added else (second, first)
    used.say((used.added[0].key, 0, [7], None), draining=True)
    await until(lambda: bool(other.added))
    other.say(draining=True)
    await until(lambda: other.draining)
    assert not other.closed
    other.say((other.added[0].key, 0, [8], "length"))
    assert await begun == {0: [7, 8]}


async def test_engines_drain_one_after_the_other_with_the_answers_of_an_undisturbed_run(lasting: AsyncLLM) -> None:
    houses = [House(lasting, f"e{at}") for at in range(5)]
    await houses[0].open()
    params = SamplingParams(n=2, max_tokens=60, ignore_eos=True, seed=3)
    calls = [asyncio.create_task(read(lasting, [5, number], params)) for number in range(12)]
    for old, new in pairwise(houses):
        await until(lambda old=old: old.core.scheduler.has_work or all(call.done() for call in calls))  # type: ignore[misc]
        await new.open()
        old.core.drain()
        await until(lambda old=old: not old.core.scheduler.has_work)  # type: ignore[misc]
    model, seeds = houses[0].model, [sequence_seed(3, index) for index in range(2)]
    for number, tokens in enumerate(await asyncio.gather(*calls)):
        assert tokens == {index: model.continuation([5, number], seed, 60) for index, seed in enumerate(seeds)}
    for house in houses:
        await house.close()


async def test_a_draining_engine_is_left_when_nothing_is_open_there_and_another_one_is_ready(
    lasting: AsyncLLM,
) -> None:
    """The other engine may have another fingerprint, as new requests go to it anyway. The only engine is kept."""
    first, other = PlayedEngine("first"), PlayedEngine("other", fingerprint="fp_2")
    lasting.add_engine(first)
    begun = asyncio.create_task(read(lasting, [5], SamplingParams(max_tokens=2, ignore_eos=True)))
    await until(lambda: len(first.added) == 1)
    first.say(draining=True)
    await until(lambda: first.draining)
    lasting.add_engine(other)
    await settle()
    assert not first.closed
    first.say((first.added[0].key, 0, [7, 8], "length"))
    assert await begun == {0: [7, 8]}
    await until(lambda: first.closed)
    other.say(draining=True)
    await other.heard()
    assert not other.closed


async def test_new_requests_wait_for_an_engine_that_is_started_for_them(checkpoint: Path) -> None:
    wakes: list[str] = []
    llm = AsyncLLM(Config(model=str(checkpoint)), recovery_timeout_s=30, wake=lambda: wakes.append("wanted"))
    assert llm.is_ready
    asked = asyncio.create_task(read(llm, [5], SamplingParams(max_tokens=1, ignore_eos=True)))
    await until(lambda: bool(wakes))
    engine = PlayedEngine("first")
    llm.add_engine(engine)
    await until(lambda: bool(engine.added))
    engine.die()
    wakes.clear()
    await until(lambda: bool(wakes))
    second = PlayedEngine("second")
    llm.add_engine(second)
    await until(lambda: bool(second.added))
    second.say((second.added[0].key, 0, [6], "length"))
    assert await asked == {0: [6]}
    await llm.stop()


async def test_another_engine_is_started_for_requests_on_the_last_one_when_it_is_to_end(checkpoint: Path) -> None:
    """The open requests, and those that arrive while it drains, continue as soon as the other engine is ready."""
    wakes: list[str] = []
    llm = AsyncLLM(Config(model=str(checkpoint)), recovery_timeout_s=30, wake=lambda: wakes.append("wanted"))
    first, second = PlayedEngine("first"), PlayedEngine("second")
    llm.add_engine(first)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    begun = asyncio.create_task(read(llm, [5], params))
    await until(lambda: bool(first.added))
    assert wakes == []
    first.say((first.added[0].key, 0, [7], None), draining=True)
    await until(lambda: bool(wakes))
    wakes.clear()
    late = asyncio.create_task(read(llm, [5, 6], params))
    await until(lambda: len(first.added) == 2)
    assert wakes
    llm.add_engine(second)
    await until(lambda: len(second.added) == 2)
    for request, tokens in zip(second.added, ([8], [3, 4]), strict=True):
        second.say((request.key, 0, tokens, "length"))
    assert await asyncio.gather(begun, late) == [{0: [7, 8]}, {0: [3, 4]}]
    await llm.stop()


@pytest.mark.parametrize("is_lost_late", [False, True])
async def test_who_comes_when_all_engines_are_lost_waits_for_the_next(
    lasting: AsyncLLM, monkeypatch: pytest.MonkeyPatch, is_lost_late: bool
) -> None:
    """The engines are lost before the request arrives, or while its prompt is processed."""
    first, second = PlayedEngine("first"), PlayedEngine("second")
    lasting.add_engine(first)
    await asyncio.sleep(0)
    lost = asyncio.Event()

    async def lose() -> None:
        first.die()
        await until(lambda: not lasting.is_ready)
        lost.set()

    if is_lost_late:
        token_ids = lasting._token_ids

        async def slow_token_ids(*args: Any) -> list[int]:
            await lose()
            return await token_ids(*args)

        monkeypatch.setattr(lasting, "_token_ids", slow_token_ids)
    else:
        await lose()
    call = asyncio.create_task(read(lasting, [5, 6], SamplingParams(max_tokens=1)))
    async with asyncio.timeout(300):
        await lost.wait()
    await settle()
    assert not call.done()
    lasting.add_engine(second)
    await until(lambda: bool(second.added))
    second.say((second.added[0].key, 0, [7], "length"))
    assert await call == {0: [7]}


async def test_an_engine_that_is_started_but_never_comes_is_told(checkpoint: Path) -> None:
    llm = AsyncLLM(Config(model=str(checkpoint)), recovery_timeout_s=0.05, wake=lambda: None)
    with pytest.raises(EngineUnavailableError):
        await read(llm, [5], SamplingParams(max_tokens=1))
    await llm.stop()


async def test_an_ingress_waits_for_an_engine_that_lasts(lasting: AsyncLLM) -> None:
    first, second = PlayedEngine("first"), PlayedEngine("second")
    ready = asyncio.create_task(lasting.until_engine())
    lasting.add_engine(first)
    first.say(draining=True)
    first.draining = True
    await first.heard()
    assert not ready.done()
    lasting.add_engine(second)
    async with asyncio.timeout(300):
        await ready


async def test_tokens_come_once_if_their_message_lets_another_engine_take_over(lasting: AsyncLLM) -> None:
    """The second engine lacks an adapter of the draining engine, until a message with a token removes the adapter."""
    first, second = PlayedEngine("first"), PlayedEngine("second")
    lasting.add_engine(first)
    first.say(adapters=(LoRAAdapter("tuned", "/adapters/tuned"),))
    await until(lambda: "tuned" in lasting.adapters.known)
    call = asyncio.create_task(read(lasting, [5], SamplingParams(max_tokens=4, ignore_eos=True)))
    await until(lambda: bool(first.added))
    key = first.added[0].key
    first.say((key, 0, [7], None), draining=True)
    await until(lambda: first.draining)
    lasting.add_engine(second)
    second.say(adapters=())
    await until(lambda: bool(second.loaded))
    assert not second.added
    first.say((key, 0, [8], None), adapters=())
    await until(lambda: bool(second.added))
    assert second.added[0].drawn == ((7, 8),)
    second.say((second.added[0].key, 0, [9, 10], "length"))
    assert await call == {0: [7, 8, 9, 10]}

"""AsyncLLM with a real EngineCore in this process and the fake model: callers that read all, and callers that leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from raylm.config import CacheConfig, Config
from raylm.engine import EngineCore
from raylm.errors import EngineUnavailableError, RayLMError
from raylm.frontend import AsyncLLM, LocalEngineClient, RequestHead
from raylm.messages import EngineInfo
from raylm.params import SamplingParams
from tests.fakes import FakeExecutor, FakeModel, FakeWorker


class House:
    """One engine and its front end."""

    def __init__(self, llm: AsyncLLM, name: str = "local") -> None:
        self.llm, self.name = llm, name
        self.model = FakeModel()
        self.executor = FakeExecutor(FakeWorker(num_blocks=48, model=self.model))
        self.core = EngineCore(Config(cache=CacheConfig(num_blocks=48)), self.executor)
        self.run: asyncio.Task[None] | None = None

    async def open(self) -> None:
        info = await self.core.start()
        self.run = asyncio.create_task(self.core.run())
        self.llm.add_engine(LocalEngineClient(self.core, EngineInfo(self.name, info.max_model_len, info)))

    async def close(self) -> None:
        assert self.run is not None
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)
        await self.core.shutdown()


@pytest.fixture
async def house(llm: AsyncLLM) -> AsyncIterator[House]:
    house = House(llm)
    await house.open()
    yield house
    await house.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def read(llm: AsyncLLM, prompt: list[int], params: SamplingParams, leave_after: int | None = None) -> list[int]:
    """The tokens of one caller, who leaves after ``leave_after`` outputs, if given."""
    tokens: list[int] = []
    seen = 0
    async with aclosing(llm.generate(prompt, params, RequestHead(request_id="r"))) as outputs:
        async for output in outputs:
            seen += 1
            tokens += output.deltas[0].token_ids
            if seen == leave_after:
                break
    return tokens


async def test_tokens_and_text_come_through(house: House) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
    prompt = [5, 6, 7]
    want = house.model.continuation(prompt, 4, 20)
    assert await read(house.llm, prompt, params) == want
    async with aclosing(house.llm.generate(prompt, params, RequestHead(request_id="r"))) as outputs:
        text = "".join([delta.text async for output in outputs for delta in output.deltas])
    assert text == house.llm._tokenizer.backend.decode(want)


async def test_callers_who_leave_disturb_nobody(house: House) -> None:
    numbers = random.Random(1)
    prompts = [[numbers.randrange(1, 50) for _ in range(numbers.randrange(1, 90))] for _ in range(72)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=9)
    honest = [asyncio.create_task(read(house.llm, prompt, params)) for prompt in prompts[:8]]
    leaving = [
        asyncio.create_task(read(house.llm, prompt, params, leave_after=numbers.randrange(1, 30)))
        for prompt in prompts[8:]
    ]
    for task in leaving[::3]:
        await asyncio.sleep(0.002 * numbers.random())
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    for prompt, task in zip(prompts, honest, strict=False):
        assert await task == house.model.continuation(prompt, 9, 60)
    await until(lambda: not house.core.scheduler.stats().running)
    assert not house.core.scheduler.open_requests()
    assert house.core.scheduler.stats().kv_usage == 0
    assert not house.llm._router.num_prompts


async def test_a_dead_core_is_told_to_everybody(house: House) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    readers = [asyncio.create_task(read(house.llm, [5], params)) for _ in range(4)]
    await until(lambda: len(house.core.scheduler.open_requests()) == 4)
    house.executor.die()
    for outcome in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(outcome, RayLMError)
    await until(lambda: not house.llm.is_ready)
    with pytest.raises(EngineUnavailableError):
        await read(house.llm, [5], params)

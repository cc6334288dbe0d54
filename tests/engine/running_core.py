"""A running EngineCore over a fake executor, and the expected outputs of its clients."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from raylm.config import CacheConfig, Config, SchedulerConfig
from raylm.engine import EngineCore
from raylm.engine.model_executor import ModelExecutor
from raylm.engine.outbox import Outbox
from raylm.engine.sequence import sequence_seed
from raylm.errors import (
    EngineDiedError,
)
from raylm.messages import EngineCoreRequest
from tests.engine.build import request
from tests.engine.integrity import check_kv
from tests.fakes import FakeModel

Tokens = dict[tuple[int, int], list[int]]


def config(steps_in_flight: Any = 2, max_model_len: int | None = None, num_blocks: int = 40) -> Config:
    return Config(
        max_model_len=max_model_len,
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, steps_in_flight=steps_in_flight),
    )


@asynccontextmanager
async def running(executor: ModelExecutor, settings: Config | None = None) -> AsyncIterator[EngineCore]:
    """A started core that runs in the background. At the end it must be idle, with intact KV blocks."""
    core = EngineCore(settings or config(), executor)
    await core.start()
    run = asyncio.create_task(core.run())
    try:
        yield core
        await until(lambda: not core.scheduler.has_work and not core._in_flight)
        check_kv(core.scheduler.kv)
        core.scheduler.kv.check_idle()
    finally:
        run.cancel()
        with suppress(asyncio.CancelledError, EngineDiedError):
            await run
        await core.shutdown()


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


async def collect(outbox: Outbox, sequences: int) -> Tokens:
    """All tokens until ``sequences`` sequences have ended."""
    tokens: Tokens = defaultdict(list)
    while sequences:
        out = await outbox.get()
        assert not out.errors
        start = 0
        for key, index, count in zip(out.keys, out.indexes, out.token_counts, strict=True):
            tokens[key, index] += out.token_ids[start : start + count]
            start += count
        sequences -= sum(reason is not None for reason in out.finish_reasons)
    return tokens


def answers(requests: list[EngineCoreRequest]) -> Tokens:
    """The expected tokens of requests with ignore_eos and max_tokens."""
    return {
        (one.key, index): FakeModel().continuation(
            one.prompt_token_ids, sequence_seed(one.params.seed or 0, index), one.params.max_tokens or 0
        )
        for one in requests
        for index in range(one.params.n)
    }


def some(count: int = 12, **params: Any) -> list[EngineCoreRequest]:
    return [
        request([1 + key % 3] * (5 + 5 * key), key, **{"max_tokens": 30, "ignore_eos": True, "n": 1 + key % 2} | params)
        for key in range(count)
    ]


# -------------------------------------------------------------------- life

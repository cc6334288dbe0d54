"""Outbox: outputs that a client has not read are merged in order, and none is lost at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raylm.engine.outbox import Outbox, merge
from raylm.errors import EngineDiedError
from raylm.logprob_columns import select
from raylm.messages import EngineCoreOutputs, EngineStats, Logprobs


def news(*tokens: int, key: int = 1, logprobs: Logprobs | None = None, **fields: Any) -> EngineCoreOutputs:
    count = len(tokens)
    columns: dict[str, Any] = {"finish_reasons": [None] * count, "stop_reasons": [None] * count, "stats": EngineStats()}
    return EngineCoreOutputs(
        keys=[key] * count,
        indexes=[0] * count,
        token_counts=[1] * count,
        token_ids=list(tokens),
        cached_tokens=[0] * count,
        logprobs=logprobs,
        **(columns | fields),
    )


def logprobs_of(*tokens: int) -> Logprobs:
    return Logprobs([1] * len(tokens), list(tokens), [-float(token) for token in tokens], [1] * len(tokens))


async def test_what_is_not_taken_is_merged_in_order() -> None:
    outbox = Outbox()
    outbox.put(news(5, 6, created=1.0, stats=EngineStats(steps=1)))
    outbox.put(news(7, finish_reasons=["stop"], stop_reasons=[7], errors=[(3, "no")], created=2.0))
    outbox.put(news(8, key=2, prompt_logprobs=[(2, logprobs_of(9))], created=3.0, stats=EngineStats(steps=3)))
    got = await outbox.get()
    assert got == EngineCoreOutputs(
        keys=[1, 1, 1, 2],
        indexes=[0] * 4,
        token_counts=[1] * 4,
        token_ids=[5, 6, 7, 8],
        finish_reasons=[None, None, "stop", None],
        stop_reasons=[None, None, 7, None],
        cached_tokens=[0] * 4,
        stats=EngineStats(steps=3),
        prompt_logprobs=[(2, logprobs_of(9))],
        errors=[(3, "no")],
        created=3.0,
    )


@pytest.mark.parametrize("first", [True, False])
def test_tokens_without_logprobs_are_padded(first: bool) -> None:
    bare, full = news(5, 6), news(7, logprobs=logprobs_of(7))
    merged = merge(bare, full) if first else merge(full, bare)
    assert merged.logprobs is not None
    assert merged.logprobs.counts == ([0, 0, 1] if first else [1, 0, 0])
    assert merged.logprobs.ranks == merged.logprobs.counts
    assert merged.logprobs.token_ids == [7]


def test_selected_logprobs() -> None:
    whole = Logprobs([2, 0, 1], [1, 2, 3], [-1.0, -2.0, -3.0], [4, 0, 5])
    assert select(whole, [2, 0]) == Logprobs([1, 2], [3, 1, 2], [-3.0, -1.0, -2.0], [5, 4])
    assert select(whole, [1]) is None


async def test_get_waits() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(news(5))
    assert (await waiting).token_ids == [5]
    assert outbox._held is None


async def test_the_end_comes_after_the_rest() -> None:
    outbox = Outbox()
    outbox.put(news(5))
    outbox.close(EngineDiedError("gone"))
    assert (await outbox.get()).token_ids == [5]
    for _ in range(2):
        with pytest.raises(EngineDiedError, match="gone"):
            await outbox.get()


async def test_who_waits_learns_of_the_end() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.close(EngineDiedError("gone"))
    with pytest.raises(EngineDiedError):
        await waiting


async def test_stats_alone_are_told_only_if_they_are_news() -> None:
    outbox = Outbox()
    outbox.put(news(stats=EngineStats(running=1)))
    await outbox.get()
    outbox.put_stats(news(stats=EngineStats(running=1, steps=9)))
    assert outbox._held is None
    outbox.put_stats(news(stats=EngineStats(running=0, steps=9)))
    assert (await outbox.get()).stats == EngineStats(steps=9)


def test_that_an_engine_drains_is_not_lost_in_what_is_merged() -> None:
    told, fresh = (
        EngineCoreOutputs([], [], [], [], [], [], [], EngineStats(), draining=value) for value in (True, False)
    )
    assert merge(told, fresh).draining
    assert merge(fresh, told).draining
    assert not merge(fresh, fresh).draining

"""Blocks can be found as soon as they are scheduled: a burst computes its prompt once, and failures are withdrawn."""

from __future__ import annotations

from collections import deque

import pytest

from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from tests.engine.build import CLIENT, Engine, request
from tests.fakes import FakeModel, FakeWorker

PROMPT = [1 + place % 7 for place in range(2000)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [512, 2048, 8192])
@pytest.mark.parametrize("length", [2000, 1999, 1985])
def test_a_burst_of_equal_prompts_is_computed_once(in_flight: int, budget: int, length: int) -> None:
    """All blocks but the last one, of which each sequence computes its own tokens."""
    kv, model = KVCacheManager(4000, 16), FakeModel()
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget), kv, 4000)
    worker = FakeWorker(4000, 16, 4000, max_num_batched_tokens=budget, model=model)
    prompt, burst = PROMPT[:length], 16
    for key in range(burst):
        scheduler.add(CLIENT, request(prompt, key, max_tokens=3, ignore_eos=True))
    flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    drawn: dict[int, list[int]] = {key: [] for key in range(burst)}
    while scheduler.has_work:
        while len(flying) < in_flight and (plan := scheduler.schedule()):
            flying.append((plan, worker.execute(plan)))
        for outputs in scheduler.update(*flying.popleft()).values():
            for key, token in zip(outputs.keys, outputs.token_ids, strict=True):
                drawn[key].append(token)
    tail = (length - 1) % 16 + 1
    assert worker.tokens_computed == length + (burst - 1) * tail + 2 * burst
    assert list(drawn.values()) == [model.continuation(prompt, 7, 3)] * burst


def test_a_chunk_is_shared_while_it_is_computed_and_no_more_than_it() -> None:
    engine = Engine(num_blocks=30, max_num_batched_tokens=16)
    engine.add([1] * 20, key=0)
    first = engine.schedule()
    engine.add([1] * 20, key=1)
    second = engine.schedule()
    assert (second.seq_ids, second.num_computed, second.num_scheduled) == ([0, 1], [16, 16], [4, 4])
    assert second.new[0].block_ids[:4] == first.new[0].block_ids[:4]


def test_what_failed_is_withdrawn_and_computed_again_by_who_comes_later() -> None:
    engine = Engine(num_blocks=30)
    engine.add([1] * 9, key=0)
    engine.add([1] * 8 + [2] * 9, key=1)
    plan = engine.schedule()
    assert plan.num_computed == [0, 8]
    engine.add([1] * 8 + [3], key=2)
    ahead = engine.schedule()
    assert dict(zip(ahead.seq_ids, ahead.num_computed, strict=True))[2] == 8
    out = engine.update(plan, failed=[(0, "not finite"), (1, "not finite")])
    assert out is not None
    assert sorted(key for key, _ in out.errors) == [0, 1]
    engine.add([1] * 8 + [4], key=3)
    fresh = engine.schedule()
    assert dict(zip(fresh.seq_ids, fresh.num_computed, strict=True))[3] == 0
    out = engine.update(ahead, failed=[(2, "not finite")])  # it read those blocks, so its own logits are not finite
    assert out is not None
    assert [key for key, _ in out.errors] == [2]

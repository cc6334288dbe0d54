"""With several stages, decoding sequences take turns, so that every stage has a step. Prompts do not wait."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from raylm.messages import SchedulerOutput
from tests.engine.build import Engine


def steps(engine: Engine, count: int, in_flight: int) -> list[SchedulerOutput]:
    """The next steps, ``in_flight`` at a time. Every sequence draws the token 5."""
    planned: list[SchedulerOutput] = []
    waiting: deque[SchedulerOutput] = deque()
    while len(planned) < count:
        while len(waiting) < in_flight and (plan := engine.scheduler.schedule()) is not None:
            planned.append(plan)
            waiting.append(plan)
        assert waiting, "requests are open, but no step can be scheduled"
        engine.update(waiting.popleft())
    while waiting:
        engine.update(waiting.popleft())
    return planned


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_each_step_has_its_share_and_no_sequence_twice_in_a_round(stages: int, sequences: int) -> None:
    engine = Engine(num_blocks=400, stages=stages)
    for key in range(sequences):
        engine.add([1, 2, 3], key, max_tokens=400, ignore_eos=True)
    planned = steps(engine, 120, stages + 1)[30:90]
    share = -(-sequences // stages)
    apart = -(-sequences // share)
    assert max(len(plan.seq_ids) for plan in planned) == share
    for at in range(len(planned) - apart):
        drawn = [seq_id for plan in planned[at : at + apart] for seq_id in plan.seq_ids]
        assert len(set(drawn)) == len(drawn) == sequences
    turns = Counter(seq_id for plan in planned for seq_id in plan.seq_ids)
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_prompt_is_computed_in_every_step() -> None:
    engine = Engine(num_blocks=400, stages=2, max_num_batched_tokens=8)
    engine.add([1, 2, 3], 0, max_tokens=400, ignore_eos=True)
    engine.add([1, 2, 3], 1, max_tokens=400, ignore_eos=True)
    steps(engine, 20, 3)
    engine.add(list(range(49)), 2, max_tokens=3, ignore_eos=True)
    planned = steps(engine, 12, 3)
    chunks = [plan.num_scheduled[-1] for plan in planned if 2 in plan.seq_ids and plan.num_scheduled[-1] > 1]
    assert sum(chunks) == 49
    at = [at for at, plan in enumerate(planned) if max(plan.num_scheduled) > 1]
    assert at == list(range(at[0], at[0] + len(at)))


def test_a_sequence_without_blocks_does_not_hold_up_the_first_one() -> None:
    """The second sequence waited longer for a step, but gets no block while the first one has them."""
    engine = Engine(num_blocks=5, block_size=2, stages=2)
    engine.add([1, 2, 3], 0, max_tokens=7, ignore_eos=True)
    engine.add([1, 2, 3], 1, max_tokens=7, ignore_eos=True)
    while engine.scheduler.has_work:
        steps(engine, 1, 3)
    assert engine.scheduler.counters.generation_tokens == 14
    assert engine.scheduler.counters.preemptions > 0


def test_sequences_that_end_leave_their_turn_to_the_others() -> None:
    engine = Engine(num_blocks=400, stages=2)
    for key in range(8):
        engine.add([1, 2, 3], key, max_tokens=12 if key % 2 else 400, ignore_eos=True)
    planned = steps(engine, 120, 3)
    assert [len(plan.seq_ids) for plan in planned[-20:]] == [2] * 20

"""The sequences that the Scheduler preempts, and how they come back."""

from __future__ import annotations

import pytest

from raylm.messages import SchedulerOutput
from tests.engine.build import Engine, crowd


def test_the_one_with_the_least_work_to_lose_goes_first() -> None:
    engine = Engine(num_blocks=6)
    crowd(engine, 4, 6, 9)  # 1 + 2 + 3 blocks: the pool is full
    plan = engine.schedule()
    assert [seq.key for seq in engine.scheduler.running] == [0, 2]
    assert plan.finished == [1]
    assert plan.new_block_counts == [1, 0]


def test_the_newest_goes_first_among_equals() -> None:
    engine = Engine(num_blocks=5)
    crowd(engine, 4, 6, 6)
    engine.schedule()
    assert [seq.key for seq in engine.scheduler.running] == [0, 1]


def test_the_lower_class_goes_first_whatever_it_loses() -> None:
    engine = Engine(num_blocks=6, policy="priority")
    crowd(engine, 4, 6, 9, priority=[0, 1, 2])
    engine.schedule()
    assert [seq.key for seq in engine.scheduler.running] == [0, 1]


def test_who_only_waits_for_its_last_token_loses_nothing() -> None:
    engine = Engine(num_blocks=6)
    crowd(engine, 4, 6, 9, max_tokens=[9, 9, 2])
    running = engine.scheduler.running
    assert running[2].num_tokens < running[2].limit
    running[2].num_tokens = running[2].limit  # its last token is in flight
    assert engine.schedule().finished == [2]


def test_shared_blocks_are_no_loss() -> None:
    engine = Engine(num_blocks=20)
    crowd(engine, 4, 6)
    prompt = [9] * 33
    for key in (2, 3):
        engine.add(prompt, key=key)
        engine.step()
    costs = {seq.key: engine.scheduler._cost_of_preemption(seq)[1] for seq in engine.scheduler.running}
    assert costs[1] == 8
    assert costs[3] == 33 - 32
    assert costs[2] == 34 - 32


def test_who_comes_behind_sits_out_and_keeps_its_work() -> None:
    engine = Engine(num_blocks=5)
    crowd(engine, 9, 8)  # 3 + 2 blocks; the second sequence needs another one
    plan = engine.schedule()
    assert plan.seq_ids == [0]
    assert len(engine.scheduler.running) == 2
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_a_sequence_alone_always_fits(num_blocks: int, steps_in_flight: int) -> None:
    """max_model_len is limited to the pool, so the longest sequence ends by length and is never preempted."""
    engine = Engine(num_blocks=num_blocks, max_model_len=10**6)
    longest = num_blocks * 4
    assert engine.scheduler.max_model_len == longest
    for prompt in range(1, longest):
        engine.add([1] * prompt, key=prompt)
        in_flight: list[SchedulerOutput] = []
        tokens, reasons = 0, list[str | None]()
        while engine.scheduler.has_work:
            while len(in_flight) < steps_in_flight and (plan := engine.scheduler.schedule()):
                in_flight.append(plan)
            out = engine.update(in_flight.pop(0))
            assert out is not None
            tokens += len(out.token_ids)
            reasons += out.finish_reasons
        assert tokens == longest - prompt
        assert reasons[-1] == "length"
        engine.kv.check_idle()
    assert engine.scheduler.counters.preemptions == 0


def test_two_that_do_not_fit_together_both_end() -> None:
    engine = Engine(num_blocks=4, max_model_len=16)
    for key in (0, 1):
        engine.add([key + 1] * 4, key=key)
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        assert steps < 60
    assert engine.scheduler.counters.generation_tokens == 24
    assert engine.scheduler.counters.preemptions > 0

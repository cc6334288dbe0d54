"""Time limits: a request is given up only before it draws a token, before a plan contains it, and as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raylm.engine.scheduler import _MOST_GIVEN_UP
from raylm.messages import EngineCoreRequest, SchedulerOutput, ServiceLevel
from raylm.worker.input_batch import InputBatch
from tests.engine.build import CLIENT, Engine, request


def limited(key: int, timeout_s: float, prompt: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    """A request that arrives at 1000 s of the clock."""
    made: EngineCoreRequest = request(prompt or [key + 1] * 4, key, **params)
    return replace(made, arrival_time=1000.0, service=ServiceLevel(timeout_s=timeout_s))


def at(engine: Engine, now: float) -> None:
    engine.scheduler.clock = lambda: now


def test_a_sibling_that_waits_beyond_the_limit_ends_nothing() -> None:
    """The pool holds only one of the two sequences, which is in the plan when the limit ends."""
    engine, rows = Engine(num_blocks=3, block_size=16), InputBatch(8, 48, 16, 100)
    engine.scheduler.add(CLIENT, limited(0, 1.0, list(range(1, 30)), n=2, max_tokens=10, ignore_eos=True))
    for step in range(5):
        at(engine, 1000 + 0.4 * step)
        plan = engine.schedule()
        play(rows, plan)
        engine.update(plan)
    assert engine.scheduler.take_given_up() == []
    assert [seq.index for seq in engine.scheduler.waiting] == [1]


def play(rows: InputBatch, plan: SchedulerOutput) -> None:
    """Update the rows as a worker does. A scheduled sequence without a row raises KeyError."""
    for seq_id in plan.finished:
        rows.remove(seq_id)
    for new in plan.new:
        rows.add(new)
    rows.rows(plan.seq_ids)


def test_a_request_that_was_preempted_goes_on_once_it_has_drawn() -> None:
    engine = Engine()
    engine.scheduler.add(CLIENT, limited(0, 1.0))
    at(engine, 1000)
    plan = engine.schedule()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.update(plan)
    at(engine, 1002)
    assert [new.num_prompt_tokens for new in engine.schedule().new] == [4]
    assert engine.scheduler.take_given_up() == []


def test_a_request_that_was_preempted_before_its_first_token_is_given_up() -> None:
    engine = Engine(max_num_batched_tokens=2)
    engine.scheduler.add(CLIENT, limited(0, 1.0))
    at(engine, 1000)
    engine.update(engine.schedule())
    engine.scheduler._preempt(engine.scheduler.running[0])
    at(engine, 1002)
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.take_given_up() == [(CLIENT, 0)]
    engine.kv.check_idle()


@pytest.mark.parametrize("drawn", [((5,), ()), ((), (5,)), (None, ())])
def test_what_another_engine_has_drawn_of_counts_for_the_request(drawn: tuple[tuple[int, ...] | None, ...]) -> None:
    engine = Engine()
    engine.scheduler.add(CLIENT, replace(limited(0, 1.0, n=2, max_tokens=9), drawn=drawn))
    at(engine, 1002)
    assert len(engine.schedule().new) == sum(one is not None for one in drawn)
    assert engine.scheduler.take_given_up() == []


def test_one_that_is_not_first_in_line_is_given_up_in_time() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add([9] * 4, 0, max_tokens=99, ignore_eos=True)
    engine.step()
    engine.add([8] * 4, 1)
    engine.scheduler.add(CLIENT, limited(2, 1.0))
    at(engine, 1002)
    engine.step()
    assert engine.scheduler.take_given_up() == [(CLIENT, 2)]


def test_many_are_given_up_by_and_by_and_none_of_them_starts() -> None:
    engine = Engine(num_blocks=400)
    for key in range(_MOST_GIVEN_UP + 1):
        engine.scheduler.add(CLIENT, limited(key, 1.0))
    engine.add([9] * 4, 1000, max_tokens=1)
    at(engine, 1002)
    assert engine.scheduler.schedule() is None
    assert len(engine.scheduler.take_given_up()) == _MOST_GIVEN_UP
    assert [new.token_ids[0] for new in engine.schedule().new] == [9]
    assert len(engine.scheduler.take_given_up()) == 1
    assert len(engine.scheduler._limits) == 0


@pytest.mark.parametrize("end", ["abort", "run"])
def test_nothing_is_kept_of_what_has_ended(end: str) -> None:
    engine = Engine()
    at(engine, 1000)
    engine.scheduler.add(CLIENT, limited(0, 600.0, n=3, max_tokens=2, ignore_eos=True))
    if end == "abort":
        engine.scheduler.abort(CLIENT, 0)
    while engine.scheduler.has_work:
        engine.step()
    assert len(engine.scheduler._limits) == 0

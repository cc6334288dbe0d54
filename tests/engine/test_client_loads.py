"""ClientLoads: the load that an engine reports for each client, compared with the sequences."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from raylm.engine.scheduler import Scheduler
from raylm.engine.sequence import Status
from raylm.messages import ModelRunnerOutput, OtherClients, SchedulerOutput
from tests.engine.build import Engine, request
from tests.engine.simulation import Run, random_script, random_setup


def check_loads(scheduler: Scheduler) -> None:
    """The sums equal those over the open sequences. A decoding sequence owes fewer tokens than it has."""
    tokens, sequences = Counter[str](), Counter[str]()
    for seq in scheduler._sequences.values():
        owed = scheduler.loads._owed.get(seq.id, 0)
        tokens[seq.client_id] += owed
        sequences[seq.client_id] += 1
        if seq.status is Status.RUNNING and seq.num_generated and not seq.state.request.drawn:
            assert owed <= max(0, len(seq.token_ids) - 1)
    assert +scheduler.loads._tokens == +tokens
    assert scheduler.loads._sequences == sequences
    assert scheduler.loads._owed.keys() <= scheduler._sequences.keys()


@pytest.mark.parametrize("seed", range(40))
def test_sums_follow_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(random_setup(rng))
    for op in random_script(rng, 60):
        getattr(run, op.kind)(op)
        check_loads(run.scheduler)


def drawn(plan: SchedulerOutput) -> ModelRunnerOutput:
    seq_ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
    return ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), [9] * len(seq_ids))


def test_a_prompt_is_owed_until_it_is_computed_and_others_are_told_of_it() -> None:
    engine = Engine(num_blocks=100, max_num_batched_tokens=8)
    scheduler = engine.scheduler
    scheduler.add("a", replace(request([1] * 21, 1, max_tokens=3, ignore_eos=True), uncached_tokens=5))
    assert scheduler.loads.others("b") == OtherClients(4, 1), "the client's own estimate"
    assert scheduler.loads.others("a") == OtherClients()
    owed = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, drawn(plan))
        owed.append(scheduler.loads.others("b"))
    assert owed == [OtherClients(tokens, 1) for tokens in (12, 4, 0, 0)] + [OtherClients()]
    assert not scheduler.loads._tokens
    assert not scheduler.loads._sequences


def test_places_are_what_is_left_of_the_batch() -> None:
    engine = Engine(num_blocks=100)
    assert engine.scheduler.stats().places == 8
    engine.scheduler.add("a", request([1, 2, 3], 1, max_tokens=3))
    engine.scheduler.schedule()
    assert engine.scheduler.stats().places == 7

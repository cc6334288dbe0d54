"""StepBudget: the scheduler in a world where a formula gives the time of a step, with long prompts among streams."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from raylm.engine.sequence import Sequence
from raylm.engine.step_budget import MIN_PREFILL_TOKENS, SPEED_EVERY, LatencyBudget, StepBudget
from raylm.messages import ModelRunnerOutput, SchedulerOutput, ServiceLevel
from tests.engine.build import CLIENT, Engine, request, sequence

MOST = 2048
Cost = Callable[[int], float]
Budget = TypeVar("Budget", bound=StepBudget)


def line(tokens: int) -> float:
    """20 ms for the weights and 1 ms for each token: 180 tokens in 200 ms."""
    return 0.020 + 0.001 * tokens


def decoding(count: int) -> list[Sequence]:
    """Sequences with one token to compute."""
    sequences = [sequence([1, 2, 3], seq_id) for seq_id in range(count)]
    for seq in sequences:
        seq.num_computed = 2
    return sequences


def prefilling() -> Sequence:
    return sequence([1, 2, 3], seq_id=99)


def step_of(tokens: int) -> SchedulerOutput:
    return SchedulerOutput(1, [], [], [0], [0], [tokens], [False], [0], [])


def shown(budget: Budget, *sizes: int, cost: Cost = line) -> Budget:
    for tokens in sizes:
        budget.observe(step_of(tokens), ModelRunnerOutput(1, [], [], [], step_s=cost(tokens)))
    return budget


@pytest.mark.parametrize("largest", [2048, 512])
def test_a_shared_engines_steps_are_just_long_enough_to_be_efficient(largest: int) -> None:
    running = [*decoding(3), prefilling()]
    budget = shown(LatencyBudget(MOST, 8), *[1, 64, 256, largest] * SPEED_EVERY)
    assert budget.tokens(running) == MOST
    tokens = budget.tokens(running, shared=True)
    assert tokens < MOST / 2
    fastest = MOST / line(MOST)
    assert tokens / line(tokens) > 0.85 * fastest


def test_and_as_long_as_they_may_be_while_their_speed_is_not_known() -> None:
    assert LatencyBudget(MOST, 8).tokens(decoding(3), shared=True) == MOST
    assert shown(LatencyBudget(MOST, 8), *[1] * SPEED_EVERY).tokens(decoding(3), shared=True) == MOST


def test_the_shortest_of_a_target_and_a_shared_engine_counts() -> None:
    budget = shown(LatencyBudget(MOST, 8, 0.1), *[1, 64, 256, 2048] * SPEED_EVERY)
    assert budget.tokens(decoding(3), shared=True) == budget.tokens(decoding(3)) < 150


def test_fixed_is_fixed() -> None:
    assert StepBudget(MOST, 8).tokens([]) == StepBudget(MOST, 8).tokens([*decoding(3), prefilling()]) == MOST


def test_a_step_is_whole_while_nobody_decodes_or_nothing_was_seen() -> None:
    assert LatencyBudget(MOST, 8, 0.2).tokens(decoding(3)) == MOST
    assert shown(LatencyBudget(MOST, 8, 0.2), 2048).tokens([prefilling()]) == MOST


@pytest.mark.parametrize("count", [1, 32])
def test_a_step_with_decoding_sequences_keeps_to_the_target(count: int) -> None:
    budget = shown(LatencyBudget(MOST, 8, 0.2), 1, 64, 100, 256, 2048)
    assert budget.tokens([*decoding(count), prefilling()]) == pytest.approx(180, abs=2)


def test_prompts_get_on_whatever_the_target_is() -> None:
    assert shown(LatencyBudget(MOST, 8, 0.001), 1, 64, 2048).tokens(decoding(5)) == 5 + MIN_PREFILL_TOKENS


def test_no_step_is_larger_than_configured() -> None:
    assert shown(LatencyBudget(100, 8, 60.0), 1, 64).tokens(decoding(5)) == 100
    assert shown(LatencyBudget(16, 8, 0.001), 1).tokens(decoding(5)) == 16


@pytest.mark.parametrize(("server_s", "own_s", "tokens"), [
    (math.inf, [0.1, 0.3], 80), (0.2, [0.1], 80), (0.2, [0.3], 180), (math.inf, [], MOST), (0.1, [0.3] * 4, 280),
])  # fmt: skip
def test_the_tightest_target_of_those_that_decode_counts(server_s: float, own_s: list[float], tokens: int) -> None:
    budget = shown(LatencyBudget(MOST, 8, server_s), 1, 64, 100, 256, 2048)
    running = [*decoding(4), paced(prefilling(), 0.01)]  # a sequence that does not decode waits for no token
    for seq, target_s in zip(running, own_s, strict=False):
        paced(seq, target_s)
    for seq in running:
        budget.join(seq)
    assert budget.tokens(running) == pytest.approx(tokens, abs=2)
    for seq in running:
        budget.leave(seq)
    usual = MOST if server_s == math.inf else int(1000 * server_s - 20)
    assert budget.tokens(decoding(4)) == pytest.approx(usual, abs=2), "sequences that have left have no effect"


def paced(seq: Sequence, itl_s: float) -> Sequence:
    seq.state.request = replace(seq.state.request, service=ServiceLevel(itl_s=itl_s))
    return seq


@pytest.mark.parametrize(("server_s", "own_s", "tokens"), [
    (math.inf, [0.001], MOST), (math.inf, [0.023], MOST), (0.2, [0.001], 180), (math.inf, [0.001, 0.1], 80),
    (math.inf, [0.025], 4 + MIN_PREFILL_TOKENS),
])  # fmt: skip
def test_a_requests_target_that_cannot_be_met_is_not_followed(server_s: float, own_s: list[float], tokens: int) -> None:
    """Four decoding sequences alone take 24 ms."""
    budget = shown(LatencyBudget(MOST, 8, server_s), 1, 4, 32, 64, 100, 256, 2048)
    running = [*decoding(4), prefilling()]
    for seq, target_s in zip(running, own_s, strict=False):
        paced(seq, target_s)
    for seq in running:
        budget.join(seq)
    assert budget.tokens(running) == pytest.approx(tokens, abs=2)


@pytest.mark.parametrize(("itl_s", "tokens"), [(None, 901), (0.1, 80)])
def test_a_requests_own_target_cuts_the_prompts_beside_it(itl_s: float | None, tokens: int) -> None:
    engine = Engine(400, max_num_batched_tokens=MOST)
    shown(engine.scheduler._budget, 1, 64, 256, 2048)
    stream = replace(request([1] * 4, max_tokens=50), service=ServiceLevel(itl_s=itl_s))
    engine.scheduler.add(CLIENT, stream)
    engine.step()
    engine.add([2] * 900, key=1)
    assert engine.schedule().num_tokens == pytest.approx(tokens, abs=2)
    engine.scheduler.abort(CLIENT, 0)
    left = 1 if itl_s is None else pytest.approx(821, abs=2)
    assert engine.schedule().num_tokens == left, "the aborted request has no effect"


def test_guesses_count_as_tokens() -> None:
    budget = LatencyBudget(MOST, 8, 0.2)
    for _ in range(3):
        budget.observe(step_of(10), ModelRunnerOutput(1, [], [], [], step_s=line(110), drafted_tokens=100))
    assert 100 < budget.tokens(decoding(1)) < 180


class World:
    """An engine with ``streams`` that decode all the time, while prompts of 1,000 tokens arrive."""

    def __init__(self, streams: int, cost: Cost, target_itl_ms: float | None) -> None:
        self.engine = Engine(
            num_blocks=4000,
            max_num_seqs=64,
            max_num_batched_tokens=MOST,
            target_itl_ms=target_itl_ms,
            max_model_len=9000,
        )
        self.cost = cost
        self.seconds = 0.0
        self.steps: list[float] = []
        self.keys = 0
        for _ in range(streams):
            self.add([1, 2, 3], max_tokens=5000)
        self.step()

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self.engine.add([self.keys, *prompt], self.keys, max_tokens=max_tokens, ignore_eos=True)
        self.keys += 1

    def step(self) -> SchedulerOutput:
        plan = self.engine.schedule()
        took = self.cost(plan.num_tokens)
        self.seconds += took
        self.steps.append(took)
        ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
        result = ModelRunnerOutput(plan.step, ids, [1] * len(ids), [5] * len(ids), step_s=took)
        self.engine.scheduler.update(plan, result)
        return plan

    def run(self, prompts: int) -> list[float]:
        """Add prompts one after the other. Returns the times of the steps until all are done."""
        self.steps.clear()
        for _ in range(prompts):
            key = self.keys
            self.add(list(range(1000)), max_tokens=4)
            while (CLIENT, key) in self.engine.scheduler.open_requests():
                self.step()
        return self.steps


def share_above(steps: list[float], seconds: float) -> float:
    return sum(step > seconds for step in steps) / len(steps)


@pytest.mark.parametrize("streams", [1, 16, 40])
@pytest.mark.parametrize("target_ms", [100.0, 200.0, 500.0])
def test_streams_keep_their_pace_while_prompts_arrive(streams: int, target_ms: float) -> None:
    paced, fixed = World(streams, line, target_ms), World(streams, line, None)
    assert share_above(fixed.run(10), 1.0) > 0.2
    steps = paced.run(10)
    least = line(streams + MIN_PREFILL_TOKENS)
    assert share_above(steps, max(1.1 * target_ms / 1000, least)) < 0.05
    assert paced.seconds < fixed.seconds * 1.8


def test_disturbed_steps_do_not_shrink_the_chunks_for_good() -> None:
    rng = random.Random(0)
    world = World(8, lambda tokens: line(tokens) * (1 if rng.random() < 0.9 else rng.uniform(2, 20)), 200.0)
    world.run(20)
    sizes = [world.step().num_tokens for _ in range(3)]
    assert sizes == [8, 8, 8]
    world.add(list(range(1000)), max_tokens=4)
    assert 150 < world.step().num_tokens < 210


def test_a_machine_that_becomes_slower_gets_smaller_chunks() -> None:
    slow = 1.0
    world = World(8, lambda tokens: line(tokens) * slow, 200.0)
    world.run(10)
    slow = 1.5
    world.run(10)
    assert share_above(world.run(5), 0.23) < 0.05
    slow = 1.0
    world.run(40)
    world.add(list(range(1000)), max_tokens=4)
    assert 130 < world.step().num_tokens < 210


def test_every_prompt_comes_to_its_end_in_time() -> None:
    world = World(4, line, 1.0)
    assert len(world.run(1)) <= -(-1001 // MIN_PREFILL_TOKENS) + 4


def test_the_speed_of_steps_is_told_once_a_large_one_was_seen() -> None:
    budget = shown(StepBudget(MOST, 8), 1, 1, 1)
    assert budget.speed[0] > 0
    assert budget.speed[1] == 0, "steps of one token do not show the speed of prompts"
    budget = shown(StepBudget(MOST, 8), *[1, 64, 1024] * SPEED_EVERY)
    assert budget.speed == pytest.approx((line(1), line(1024) / 1024), rel=0.05)
    shown(budget, *[1, 64, 1024] * SPEED_EVERY, cost=lambda tokens: 3 * line(tokens))
    assert budget.speed == pytest.approx((3 * line(1), 3 * line(1024) / 1024), rel=0.05)

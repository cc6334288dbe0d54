"""StepCost against the curve that generated the steps: few steps, disturbed steps, changes, and unknown sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.step_cost import StepCost


def line(tokens: int) -> float:
    """Seconds of a step that reads weights for 20 ms and computes 1 ms for each token."""
    return 0.020 + 0.001 * tokens


def learned(sizes: list[int], times: int = 3) -> StepCost:
    cost = StepCost()
    for _ in range(times):
        for size in sizes:
            cost.observe(size, line(size))
    return cost


def predicted(cost: StepCost, tokens: int) -> float:
    return float(np.interp(tokens, *cost.curve()))


def test_nothing_is_known_at_first() -> None:
    assert not StepCost().known
    assert learned([5]).known


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(1, 5000), st.integers(1, 5000))
def test_more_tokens_never_cost_less(sizes: list[int], one: int, other: int) -> None:
    cost = learned(sizes)
    assert 0 < predicted(cost, min(one, other)) <= predicted(cost, max(one, other))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.floats(0.001, 10.0))
def test_what_fits_is_the_inverse(sizes: list[int], seconds: float) -> None:
    cost = learned(sizes)
    most = cost.tokens_within(seconds)
    assert most == 0 or predicted(cost, most) <= seconds * (1 + 1e-9)
    assert predicted(cost, most + 1) >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("tokens", [1, 8, 40, 300, 2048])
def test_what_was_seen_is_known_and_what_lies_between_is_interpolated(tokens: int) -> None:
    cost = learned([1, 8, 32, 100, 500, 2048])
    assert predicted(cost, tokens) == pytest.approx(line(tokens))


def test_sizes_beyond_those_seen_are_proportional_and_small_ones_equal() -> None:
    cost = learned([4])
    assert predicted(cost, 1) == predicted(cost, 32) == pytest.approx(line(4))
    assert predicted(cost, 320) == pytest.approx(10 * line(4))
    assert predicted(learned([64]), 32) == pytest.approx(line(64) / 2)
    assert predicted(learned([64]), 1) == pytest.approx(line(64) / 2)


def test_disturbed_steps_do_not_count() -> None:
    rng, cost = random.Random(0), StepCost()
    for _ in range(400):
        size = rng.choice([4, 32, 256])
        cost.observe(size, line(size) * (1 if rng.random() < 0.8 else rng.uniform(2, 50)))
    for size in (4, 32, 256):
        assert predicted(cost, size) == pytest.approx(line(size), rel=0.01)


def test_a_lasting_change_is_learned_in_four_steps() -> None:
    cost = learned([8, 64], times=7)
    for _ in range(4):
        cost.observe(8, 3 * line(8))
    assert predicted(cost, 8) == pytest.approx(3 * line(8))


@pytest.mark.parametrize(("times", "lifetime"), [(1, 20), (3, 40), (7, 80), (20, 80)])
def test_a_size_not_seen_for_long_is_forgotten_the_sooner_the_less_it_was_seen(times: int, lifetime: int) -> None:
    cost = StepCost(lifetime=80)
    for _ in range(times):
        cost.observe(64, 9.0)
    for _ in range(lifetime):
        cost.observe(8, 0.02)
    assert (predicted(cost, 64), cost.times_seen(64), cost.largest) == (9.0, min(times, 7), 64)
    cost.observe(8, 0.02)
    assert (predicted(cost, 64), cost.times_seen(64), cost.largest) == (pytest.approx(0.04), 0, 8)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(1, 1 << 21))
def test_seconds_are_those_of_the_curve(sizes: list[int], tokens: int) -> None:
    cost = learned(sizes)
    assert cost.seconds(tokens) == pytest.approx(predicted(cost, tokens))

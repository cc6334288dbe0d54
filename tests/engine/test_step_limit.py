"""StepLimit: only steps that take far longer than similar steps are given up."""

from __future__ import annotations

import pytest

from raylm.engine.step_budget import StepLimit
from raylm.messages import ModelRunnerOutput, SchedulerOutput


def plan(tokens: int) -> SchedulerOutput:
    return SchedulerOutput(1, [], [], [0], [0], [tokens], [True], [0], [])


def seen(limit: StepLimit, tokens: int, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        limit.observe(plan(tokens), ModelRunnerOutput(1, [], [], [], step_s=seconds))


def test_before_anything_is_known_the_configured_limit_holds() -> None:
    assert StepLimit(300).of(plan(1)) == (300, "engine.step_timeout_s")


def test_short_steps_get_ten_seconds_and_long_ones_many_times_what_they_take() -> None:
    limit = StepLimit(300)
    seen(limit, 1, 0.01, 5)
    assert limit.of(plan(1))[0] == 10
    seen(limit, 2048, 4.0, 200)
    assert 80 <= limit.of(plan(2048))[0] <= 200
    assert limit.of(plan(1))[0] == 10


def test_a_size_that_was_not_seen_is_judged_by_its_tokens() -> None:
    limit = StepLimit(3000)
    seen(limit, 32, 1.0)
    assert limit.of(plan(1024))[0] >= 20 * 32


def test_a_lasting_change_is_learned() -> None:
    limit = StepLimit(300)
    seen(limit, 1, 0.01, 100)
    seen(limit, 1, 2.0, 100)
    assert limit.of(plan(1))[0] >= 40


@pytest.mark.parametrize("most_s", [0.2, 5])
def test_it_is_never_more_than_configured(most_s: float) -> None:
    limit = StepLimit(most_s)
    seen(limit, 1, 0.01)
    assert limit.of(plan(1)) == (most_s, "engine.step_timeout_s")


def test_what_a_step_takes_is_expected_of_the_next_of_its_size() -> None:
    limit = StepLimit(300)
    assert limit.expected_s(plan(8)) == 0
    seen(limit, 8, 0.01, 100)
    seen(limit, 512, 1.0, 100)
    assert limit.expected_s(plan(8)) == pytest.approx(0.01)
    assert limit.expected_s(plan(512)) == pytest.approx(1.0)
    assert 0.4 < limit.expected_s(plan(256)) < 0.6
    seen(limit, 8, 0.05, 100)
    assert limit.expected_s(plan(8)) == pytest.approx(0.05)
    assert limit.expected_s(plan(0)) == 0, "a step without tokens"

"""StepCosts, fitted to steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from raylm.errors import ConfigError
from raylm.messages import SchedulerOutput
from raylm.simulate import StepCosts, fit, read_steps
from raylm.simulate.step_costs import Features, features


def steps(costs: StepCosts, number: int, noise: float) -> list[tuple[Features, float]]:
    rng, found = random.Random(3), []
    for _ in range(number):
        sequences = rng.randint(1, 64)
        shape = (1.0, float(sequences + rng.choice([0, rng.randint(1, 2000)])), float(sequences), rng.random() * 3)
        seconds = (
            costs.base_s + costs.token_s * shape[1] + costs.sequence_s * shape[2] + costs.attention_s * shape[3]
        ) * rng.uniform(1 - noise, 1 + noise)
        found.append((shape, seconds))
    return found


def test_what_steps_cost_is_found_again() -> None:
    real = StepCosts(base_s=0.004, token_s=5e-5, sequence_s=2e-4, attention_s=0.003)
    found, error = fit(steps(real, 500, 0.0))
    assert error < 1e-9
    assert found.model_dump() == pytest.approx(real.model_dump())
    found, error = fit(steps(real, 2000, 0.1))
    assert 0.03 < error < 0.07
    assert found.model_dump() == pytest.approx(real.model_dump(), rel=0.15)


def test_no_cost_is_negative() -> None:
    found, _ = fit([((1.0, float(n), 1.0, n / 1e6), 0.01 - 1e-6 * n) for n in range(1, 200)])
    assert all(value >= 0 for value in found.model_dump().values())


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 steps"):
        fit(steps(StepCosts(), 15, 0.0))


def test_a_bad_line_of_a_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({"kind": "update", "shape": [3, 2, 0.5], "took_s": 0.01}) + '\n{"kind": "update"}\n')
    with pytest.raises(ConfigError, match=r"steps.jsonl, line 2"):
        read_steps(path)


def test_features_count_tokens_sequences_and_pairs() -> None:
    plan = SchedulerOutput(1, [], [], [1, 2], [100, 50], [1, 10], [True, True], [0, 0], [])
    assert features(plan) == (1.0, 11.0, 2.0, pytest.approx(600 / 1e6))

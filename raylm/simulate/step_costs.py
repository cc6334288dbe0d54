"""StepCosts: the duration of an engine's step, as a linear model, set explicitly or fitted to recorded steps."""

from __future__ import annotations

import json
from operator import mul
from pathlib import Path
from typing import Any

from pydantic import Field

from raylm.config import Frozen
from raylm.errors import ConfigError
from raylm.messages import SchedulerOutput

Features = tuple[float, float, float, float]
LEAST_STEPS = 16


class StepCosts(Frozen):
    """Seconds of a step. The defaults approximate an 8B model on a GPU."""

    base_s: float = Field(0.006, ge=0)
    """For every step."""
    token_s: float = Field(0.00006, ge=0)
    """For each token that it computes."""
    sequence_s: float = Field(0.00006, ge=0)
    """For each sequence in it."""
    attention_s: float = Field(0.0, ge=0)
    """For each pair of a token that it computes and one computed before, in millions of pairs."""

    def seconds(self, plan: SchedulerOutput) -> float:
        _, tokens, sequences, pairs = features(plan)
        return self.base_s + self.token_s * tokens + self.sequence_s * sequences + self.attention_s * pairs


def features(plan: SchedulerOutput) -> Features:
    """The factors of the four costs."""
    pairs = sum(map(mul, plan.num_scheduled, plan.num_computed)) / 1e6
    return 1.0, float(plan.num_tokens), float(len(plan.seq_ids)), pairs


def fit(steps: list[tuple[Features, float]]) -> tuple[StepCosts, float]:
    """Fit costs to steps. Returns the costs, none negative, and the error relative to the steps' seconds.

    The predicted total equals the measured total. On a shared machine some steps are slow, and the simulation includes
    that.

    Raises:
        ConfigError: there are too few steps.
    """
    import numpy as np

    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"Fitting costs needs at least {LEAST_STEPS} steps; {len(steps)} were recorded.")
    shapes = np.array([shape for shape, _ in steps])
    seconds = np.array([took for _, took in steps])
    used = [column for column in range(4) if shapes[:, column].any()]
    while True:  # a negative cost is removed from the model
        found = np.linalg.lstsq(shapes[:, used], seconds, rcond=None)[0]
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    costs = np.zeros(4)
    costs[used] = found
    costs *= seconds.sum() / (shapes @ costs).sum()
    error = float(np.abs(shapes @ costs - seconds).sum() / seconds.sum())
    base_s, token_s, sequence_s, attention_s = costs.tolist()
    return StepCosts(base_s=base_s, token_s=token_s, sequence_s=sequence_s, attention_s=attention_s), error


def read_steps(path: Path) -> list[tuple[Features, float]]:
    """The steps of a recording, each with the seconds until the next step.

    Raises:
        ConfigError: the file is not a recording, or a line is invalid.
    """
    steps: list[tuple[Features, float]] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row: Any = json.loads(line)
            if row["kind"] == "update":
                tokens, sequences, pairs = row["shape"]
                steps.append(((1.0, float(tokens), float(sequences), float(pairs)), float(row["took_s"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a line of a recording ({error!r}).") from None
    return [(shape, took) for shape, took in steps if took > 0]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from None

"""Computes the number of engines from their load, and wraps it as an autoscaling policy for Serve.

Serve pickles this module by value for its controller, so the module imports nothing from RayLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

LOAD_PERIOD_S = 1.0
"""Interval at which engines report their load to Serve."""
UPSCALE_DELAY_S = 3.0
"""Time for which the load must require more engines."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load that one engine reports to Serve.

    ``sequences`` is the number of open sequences, ``places`` how many can run at once. ``queued_s`` is the time to
    compute the waiting prompts, ``step_s`` that of a step of one token (0 while unknown), and ``itl_s`` that between
    two tokens of a sequence, all in seconds.
    """

    sequences: float = 0.0
    places: float = 1.0
    queued_s: float = 0.0
    step_s: float = 0.0
    itl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """The number of engines lies between ``min`` and ``max``. ``target_itl_s`` is None if there is no such target."""

    min: int
    max: int
    target_ttft_s: float
    target_itl_s: float | None = None


def wanted_engines(loads: Sequence[EngineLoad], there: int, targets: ScalingTargets) -> int:
    """Number of engines that would serve this load within the targets if it were spread evenly.

    ``loads`` are those of the ready engines; ``there`` also counts engines that are starting. While an engine starts,
    the number does not grow, because requests that pile up meanwhile are no measure of the load. It does not fall
    before an engine is ready.
    """
    if not loads:
        return max(targets.min, min(there, targets.max))
    need = max(_for_first_tokens(loads, targets), _for_places(loads), _for_pace(loads, targets))
    if len(loads) < there:
        need = min(need, there)
    return max(targets.min, min(need, targets.max))


def _for_first_tokens(loads: Sequence[EngineLoad], targets: ScalingTargets) -> int:
    return ceil(sum(load.queued_s for load in loads) / targets.target_ttft_s)


def _for_places(loads: Sequence[EngineLoad]) -> int:
    """Engines with enough places for all sequences; a sequence without a place waits until another one ends."""
    places = sum(max(load.places, 1.0) for load in loads)
    return ceil(len(loads) * sum(load.sequences for load in loads) / places)


def _for_pace(loads: Sequence[EngineLoad], targets: ScalingTargets) -> int:
    """Engines that keep the time between tokens.

    More engines divide the part of a step's time that exceeds a step of one token. That step itself stays the same.
    """
    if targets.target_itl_s is None:
        return 0
    shared = sum(max(0.0, load.itl_s - load.step_s) for load in loads if load.step_s < targets.target_itl_s)
    step_s = max((load.step_s for load in loads if load.step_s < targets.target_itl_s), default=0.0)
    return ceil(shared / (targets.target_itl_s - step_s))


class EnginePolicy:
    """Serve's autoscaling policy of an Engine deployment; ``targets`` are the fields of ScalingTargets."""

    def __init__(self, **targets: Any) -> None:
        self._targets = ScalingTargets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(number of engines, empty state), from the newest report of each engine."""
        loads = [EngineLoad(**found) for found in _newest(context.raw_metrics).values()]
        return wanted_engines(loads, context.target_num_replicas, self._targets), {}


def _newest(metrics: dict[str, dict[Any, Any]]) -> dict[Any, dict[str, float]]:
    """Newest values by replica. A replica without a value of every metric is left out: it is still starting."""
    names = {field.name for field in fields(EngineLoad)}
    found: dict[Any, dict[str, float]] = {}
    for name in names & metrics.keys():
        for replica, series in metrics[name].items():
            if series:
                found.setdefault(replica, {})[name] = series[-1].value
    return {replica: values for replica, values in found.items() if values.keys() == names}

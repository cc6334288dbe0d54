"""How many engines the load asks for: one pure function, and the policy by which Serve's controller asks it.

Serve pickles this module by value for its controller, so it imports nothing of RayLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine has to do, as it tells Serve.

    ``sequences`` are open on it, of at most ``places`` together; the prompts that wait take ``queued_s`` seconds to
    compute. A step of one token takes ``step_s`` seconds, 0 while unknown; a sequence gets a token each ``itl_s``.
    """

    sequences: float = 0.0
    places: float = 1.0
    queued_s: float = 0.0
    step_s: float = 0.0
    itl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Targets:
    """The number of engines is from ``min`` to ``max``; ``target_itl_s`` is None where that does not count."""

    min: int
    max: int
    target_ttft_s: float
    target_itl_s: float | None = None


def wanted_engines(loads: Sequence[EngineLoad], there: int, targets: Targets) -> int:
    """Engines that would serve this load within the targets, if all of it were spread evenly.

    ``loads`` are of those that are ready, ``there`` counts those that load too. While one loads the number does not
    grow: what piles up meanwhile says nothing about how many there have to be. Nor does it fall before one is ready.
    """
    if not loads:
        return max(targets.min, min(there, targets.max))
    need = max(_for_first_tokens(loads, targets), _for_places(loads), _for_pace(loads, targets))
    if len(loads) < there:
        need = min(need, there)
    return max(targets.min, min(need, targets.max))


def _for_first_tokens(loads: Sequence[EngineLoad], targets: Targets) -> int:
    return ceil(sum(load.queued_s for load in loads) / targets.target_ttft_s)


def _for_places(loads: Sequence[EngineLoad]) -> int:
    """A sequence without a place waits for another one's end."""
    places = sum(max(load.places, 1.0) for load in loads)
    return ceil(len(loads) * sum(load.sequences for load in loads) / places)


def _for_pace(loads: Sequence[EngineLoad], targets: Targets) -> int:
    """What steps take beyond that of a single token is shared among engines; that itself no number of them changes."""
    if targets.target_itl_s is None:
        return 0
    shared = sum(max(0.0, load.itl_s - load.step_s) for load in loads if load.step_s < targets.target_itl_s)
    step_s = max((load.step_s for load in loads if load.step_s < targets.target_itl_s), default=0.0)
    return ceil(shared / (targets.target_itl_s - step_s))


class EnginePolicy:
    """Serve's autoscaling policy of an Engine deployment; ``targets`` are the fields of Targets."""

    def __init__(self, **targets: Any) -> None:
        self._targets = Targets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(number of engines, no state), by what each has told last."""
        loads = [EngineLoad(**found) for found in _newest(context.raw_metrics).values()]
        return wanted_engines(loads, context.target_num_replicas, self._targets), {}


def _newest(metrics: dict[str, dict[Any, Any]]) -> dict[Any, dict[str, float]]:
    """By replica; one that has not told everything yet counts as one that loads."""
    names = {field.name for field in fields(EngineLoad)}
    found: dict[Any, dict[str, float]] = {}
    for name in names & metrics.keys():
        for replica, series in metrics[name].items():
            if series:
                found.setdefault(replica, {})[name] = series[-1].value
    return {replica: values for replica, values in found.items() if values.keys() == names}

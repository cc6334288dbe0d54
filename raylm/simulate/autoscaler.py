"""Autoscaler: decides the number of a simulated fleet's engines as Serve does, with a served model's policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raylm.config import ReplicaRange
from raylm.engine import UPSCALE_DELAY_S, EngineLoad, ScalingTargets, wanted_engines

Policy = Callable[[Sequence[EngineLoad], int, ScalingTargets], int]
"""As ``wanted_engines``."""
_ROUNDING_S = 1e-6


class Autoscaler:
    """Decides the number of one group's engines; ``number`` is the latest decision.

    The number changes when the policy has asked for more engines for UPSCALE_DELAY_S, or for fewer engines for
    ``downscale_delay_s``, without a pause, as in Serve.
    """

    def __init__(self, number: int, limits: ReplicaRange, policy: Policy = wanted_engines) -> None:
        itl_ms = limits.target_itl_ms
        itl_s = None if itl_ms is None else itl_ms / 1000
        self._targets = ScalingTargets(max(1, limits.min), limits.max, limits.target_ttft_s, itl_s)
        self._delays_s = {1: UPSCALE_DELAY_S, -1: limits.downscale_delay_s}
        self._policy = policy
        self._direction = 0
        self._since = 0.0
        self.number = number

    def decide(self, loads: Sequence[EngineLoad], now: float) -> int:
        """The number of engines, from a report of each ready engine at ``now``, in seconds."""
        wanted = self._policy(loads, self.number, self._targets)
        direction = (wanted > self.number) - (wanted < self.number)
        if direction != self._direction:
            self._direction, self._since = direction, now
        if direction and now - self._since + _ROUNDING_S >= self._delays_s[direction]:
            self.number, self._direction = wanted, 0
        return self.number

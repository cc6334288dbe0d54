"""StepBudget: how many tokens the Scheduler may put into a step: a fixed number, or by a latency target."""

from __future__ import annotations

from raylm.config import SchedulerConfig
from raylm.engine.sequence import Sequence
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

MIN_PREFILL_TOKENS = 64  # prompts get as many in every step, so that they come to an end whatever the target is
_LIFETIME = 512  # after so many steps a size is tried anew: it may have been slow for reasons that are gone


class StepBudget:
    """The same for every step."""

    def __init__(self, most: int) -> None:
        self._most = most

    def tokens(self, running: list[Sequence]) -> int:
        """Most tokens of the next step, when these sequences run."""
        return self._most

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step was run."""


class LatencyBudget(StepBudget):
    """While sequences decode, as many tokens as steps of ``target_s`` seconds were seen to hold.

    Each decoding sequence has its token, and prompts share the rest, at least ``MIN_PREFILL_TOKENS``. Without a
    decoding sequence the step is as large as it may be; likewise before the first step was seen.
    """

    def __init__(self, most: int, target_s: float) -> None:
        super().__init__(most)
        self._target_s = target_s
        self._cost = StepCost(_LIFETIME)

    def tokens(self, running: list[Sequence]) -> int:
        decoding = sum(seq.num_tokens - seq.num_computed == 1 for seq in running)
        if decoding == 0 or not self._cost.known:
            return self._most
        return min(self._most, max(self._cost.tokens_within(self._target_s), decoding + MIN_PREFILL_TOKENS))

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        tokens = plan.num_tokens + result.drafted_tokens
        if tokens and result.step_s > 0:
            self._cost.observe(tokens, result.step_s)


def create_budget(config: SchedulerConfig) -> StepBudget:
    if config.target_itl_ms is None:
        return StepBudget(config.max_num_batched_tokens)
    return LatencyBudget(config.max_num_batched_tokens, config.target_itl_ms / 1000)

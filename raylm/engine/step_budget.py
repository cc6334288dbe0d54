"""StepBudget: how many tokens the Scheduler may put into a step; owned by it, one member for each way to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod

from raylm.config import SchedulerConfig
from raylm.engine.sequence import Sequence
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

# What prompts get in every step, so that they come to an end whatever the target is.
MIN_PREFILL_TOKENS = 64
# After so many steps a size is tried anew: it may have been slow for reasons that are gone.
_LIFETIME = 512


class StepBudget(ABC):
    """Says before a step how many tokens it may have, and is shown every step that was run."""

    @abstractmethod
    def tokens(self, running: list[Sequence]) -> int:
        """Most tokens of the next step, when these sequences run."""

    @abstractmethod
    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take note of a step that was run."""


class FixedBudget(StepBudget):
    """The same for every step."""

    def __init__(self, most: int) -> None:
        self._most = most

    def tokens(self, running: list[Sequence]) -> int:
        """What was configured."""
        return self._most

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Nothing to learn."""


class LatencyBudget(StepBudget):
    """While sequences decode, as many tokens as steps of the target's length were seen to hold.

    Each decoding sequence has its token, and prompts share the rest, at least ``MIN_PREFILL_TOKENS``. Without a
    decoding sequence nobody waits, and the step is as large as it may be; likewise before the first step was seen, as
    nobody decodes then.

    Args:
        most: tokens of a step, whatever it takes.
        target_s: the time between two tokens of a sequence to aim at, in seconds.
    """

    def __init__(self, most: int, target_s: float) -> None:
        self._most = most
        self._target_s = target_s
        self._cost = StepCost(_LIFETIME)

    def tokens(self, running: list[Sequence]) -> int:
        """As many as the target allows with those that decode among ``running``."""
        decoding = sum(seq.num_tokens - seq.num_computed == 1 for seq in running)
        if decoding == 0 or not self._cost.known:
            return self._most
        return min(self._most, max(self._cost.tokens_within(self._target_s), decoding + MIN_PREFILL_TOKENS))

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Learn what a step of so many tokens takes."""
        tokens = plan.num_tokens + result.drafted_tokens
        if tokens and result.step_s > 0:
            self._cost.observe(tokens, result.step_s)


def create_budget(config: SchedulerConfig) -> StepBudget:
    """The budget that the configuration asks for."""
    if config.target_itl_ms is None:
        return FixedBudget(config.max_num_batched_tokens)
    return LatencyBudget(config.max_num_batched_tokens, config.target_itl_ms / 1000)

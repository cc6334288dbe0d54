"""StepBudget: how many tokens a step may have, fixed or by a latency target; StepLimit: how long it may take."""

from __future__ import annotations

from raylm.config import SchedulerConfig
from raylm.engine.sequence import Sequence
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

MIN_PREFILL_TOKENS = 64  # prompts get as many in every step, so that they come to an end whatever the target is
_LIFETIME = 512  # after so many steps a size is tried anew: it may have been slow for reasons that are gone
_LIMIT_TIMES = 20.0  # what is expected: a step of long contexts, or beside other processes, takes several times that
_LIMIT_LEAST_S = 10.0  # a kernel that is compiled on first use takes seconds
_LIMIT_LIFETIME = 64  # steps for which a limit holds; looking at all that was seen in each would cost too much


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


class StepLimit:
    """How long a step may take before its worker is given up: many times what steps of its size take.

    It is ``most_s`` (engine.step_timeout_s) until a step was seen, and never more.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._cost = StepCost()
        self._learned: dict[int, float] = {}  # seconds, by the bits of a number of tokens
        self._seen = 0

    def of(self, plan: SchedulerOutput) -> tuple[float, str]:
        """Seconds, and what limits them in words."""
        if plan.num_tokens and self._cost.known:
            bits = plan.num_tokens.bit_length()
            if (learned_s := self._learned.get(bits)) is None:
                learned_s = self._learned[bits] = max(_LIMIT_LEAST_S, _LIMIT_TIMES * self._cost.seconds(1 << bits))
            if learned_s < self._most_s:
                return learned_s, "steps of its size ever need"
        return self._most_s, "engine.step_timeout_s"

    def observe(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """A step was run."""
        tokens = plan.num_tokens + output.drafted_tokens
        if tokens and output.step_s > 0:
            self._cost.observe(tokens, output.step_s)
            self._seen += 1
            if self._seen % _LIMIT_LIFETIME == 1:
                self._learned.clear()

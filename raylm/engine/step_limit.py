"""StepLimit: how long a step may take before its worker is given up, learned from what steps have cost."""

from __future__ import annotations

from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

_TIMES = 20.0  # what is expected: a step of long contexts, or beside other processes, takes several times that
_LEAST_S = 10.0  # a kernel that is compiled on first use takes seconds
_LIFETIME = 64  # steps for which a limit holds; looking at all that was seen in each would cost too much


class StepLimit:
    """``most_s`` (engine.step_timeout_s) until a step was seen, and never more."""

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
                learned_s = self._learned[bits] = max(_LEAST_S, _TIMES * self._cost.seconds(1 << bits))
            if learned_s < self._most_s:
                return learned_s, "steps of its size ever need"
        return self._most_s, "engine.step_timeout_s"

    def observe(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """A step was run."""
        tokens = plan.num_tokens + output.drafted_tokens
        if tokens and output.step_s > 0:
            self._cost.observe(tokens, output.step_s)
            self._seen += 1
            if self._seen % _LIFETIME == 1:
                self._learned.clear()

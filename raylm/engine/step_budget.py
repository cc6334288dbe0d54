"""StepBudget: how many tokens a step may have, and what steps cost; StepLimit: how long one takes, and may take."""

from __future__ import annotations

import math

from raylm.config import SchedulerConfig
from raylm.engine.sequence import Sequence
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

MIN_PREFILL_TOKENS = 64  # prompts get as many in every step, so that they come to an end whatever the target is
SPEED_EVERY = 32  # steps after which the speed is worked out anew
_EFFICIENT = 8  # prompts' tokens in a step that take so many times as long as a step itself: nine tenths of full speed
_LARGE = 128  # tokens of a step that tells how fast prompts are computed
_LIFETIME = 512  # after so many steps a size is tried anew: it may have been slow for reasons that are gone
_LIMIT_TIMES = 20.0  # what is expected: a step of long contexts, or beside other processes, takes several times that
_LIMIT_LEAST_S = 10.0  # a kernel that is compiled on first use takes seconds
_LIMIT_LIFETIME = 64  # steps for which what was learned holds; looking at all that was seen in each would cost too much


class StepBudget:
    """The same number of tokens for every step; and what the steps of late took."""

    def __init__(self, most: int, max_num_seqs: int) -> None:
        self._most = most
        self._max_num_seqs = max_num_seqs
        self._cost = StepCost(_LIFETIME)
        self._observed = 0
        self.speed = 0.0, 0.0

    def tokens(self, running: list[Sequence], *, shared: bool = False) -> int:
        """Most tokens of the next step, when these sequences run.

        Where the engine is ``shared`` no more than make it efficient: whoever comes waits for the steps in flight.
        """
        step_s, token_s = self.speed
        if not shared or token_s == 0:
            return self._most
        decoding = sum(map(_decodes, running))
        return min(self._most, decoding + max(MIN_PREFILL_TOKENS, int(_EFFICIENT * step_s / token_s)))

    def places(self, running: list[Sequence]) -> int:
        """Sequences that may run beside these."""
        return self._max_num_seqs - len(running)

    def join(self, seq: Sequence) -> None:
        """It runs from now on."""

    def leave(self, seq: Sequence) -> None:
        """It runs no longer."""

    def first_token_s(self, tokens: int) -> float:
        """About how long a prompt of which so many tokens are to be computed takes; 0 while it is not known."""
        step_s, token_s = self.speed
        return step_s + token_s * tokens

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step was run. ``speed`` is (s of a step of one token, s of a prompt's token); 0 while it is not known."""
        tokens = plan.num_tokens + result.drafted_tokens
        if tokens == 0 or result.step_s <= 0:
            return
        self._cost.observe(tokens, result.step_s)
        if self._observed % SPEED_EVERY == 0:
            largest = self._cost.largest
            is_large = largest >= min(_LARGE, self._most)
            self.speed = self._cost.seconds(1), self._cost.seconds(largest) / largest if is_large else 0.0
        self._observed += 1


class LatencyBudget(StepBudget):
    """While sequences decode, as many tokens as steps of so many seconds were seen to hold as none of them exceeds.

    A sequence's target is its request's, or ``target_s`` where that has none. Each decoding sequence has its token, and
    prompts share the rest, at least ``MIN_PREFILL_TOKENS``. Without a decoding sequence or a target the step is as
    large as it may be; likewise before the first step was seen. A request's target below the time of a step of the
    decoding sequences alone cannot be met, and prompts do not wait for it: it counts as none.
    """

    def __init__(self, most: int, max_num_seqs: int, target_s: float = math.inf) -> None:
        super().__init__(most, max_num_seqs)
        self._target_s = target_s
        self._targets: dict[Sequence, float] = {}  # of those that run, where the request has one

    def join(self, seq: Sequence) -> None:
        if (target_s := seq.state.request.service.itl_s) is not None:
            self._targets[seq] = target_s

    def leave(self, seq: Sequence) -> None:
        self._targets.pop(seq, None)

    def tokens(self, running: list[Sequence], *, shared: bool = False) -> int:
        most = super().tokens(running, shared=shared)
        if not self._cost.known or (self._target_s == math.inf and not self._targets):
            return most
        decoding = sum(map(_decodes, running))
        shortest_s = self._cost.seconds(max(1, decoding))
        own = [target_s for seq, target_s in self._targets.items() if target_s >= shortest_s and _decodes(seq)]
        least_s = min(own, default=math.inf)
        if decoding > len(own):
            least_s = min(least_s, self._target_s)
        if least_s == math.inf:
            return most
        return min(most, max(self._cost.tokens_within(least_s), decoding + MIN_PREFILL_TOKENS))


def _decodes(seq: Sequence) -> bool:
    return seq.num_tokens - seq.num_computed == 1


def create_budget(config: SchedulerConfig) -> StepBudget:
    target_s = math.inf if config.target_itl_ms is None else config.target_itl_ms / 1000
    return LatencyBudget(config.max_num_batched_tokens, config.max_num_seqs, target_s)


class StepLimit:
    """How long a step may take before its worker is given up: many times what steps of its size take.

    It is ``most_s`` (engine.step_timeout_s) until a step was seen, and never more.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._cost = StepCost()
        self._learned: dict[int, float] = {}  # seconds, by the bits of a number of tokens
        self._expected: dict[int, float] = {}  # seconds, by the number of tokens
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

    def expected_s(self, plan: SchedulerOutput) -> float:
        """About what a step takes; 0 before one was seen."""
        tokens = plan.num_tokens
        if not tokens or not self._cost.known:
            return 0.0
        if (expected_s := self._expected.get(tokens)) is None:
            expected_s = self._expected[tokens] = self._cost.seconds(tokens)
        return expected_s

    def observe(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """A step was run."""
        tokens = plan.num_tokens + output.drafted_tokens
        if tokens and output.step_s > 0:
            self._cost.observe(tokens, output.step_s)
            self._seen += 1
            if self._seen % _LIMIT_LIFETIME == 1:
                self._learned.clear()
                self._expected.clear()

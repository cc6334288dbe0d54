"""StepBudget: how many tokens a step may have, and how long steps take. StepLimit: the time limit of a step."""

from __future__ import annotations

import math

from raylm.config import SchedulerConfig
from raylm.engine.sequence import Sequence
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.step_cost import StepCost

MIN_PREFILL_TOKENS = 64  # least prompt tokens of a step, so that prompts finish whatever the latency target is
SPEED_EVERY = 32  # steps between two updates of the speed
_EFFICIENT = 8  # prompt tokens that take 8 times as long as an empty step reach nine tenths of the full speed
_LARGE = 128  # least tokens of a step that measures the speed of prompts
_LIFETIME = 512  # steps after which the cost of a step size is forgotten: its cause may have passed
_LIMIT_TIMES = 20.0  # limit over expected time: long contexts or other processes slow a step several times
_LIMIT_LEAST_S = 10.0  # compiling a kernel on first use takes seconds
_LIMIT_LIFETIME = 64  # steps for which learned limits are kept; computing them in every step would cost too much


class StepBudget:
    """A fixed number of tokens for every step, and the measured time of recent steps.

    ``speed`` is (seconds of a step of one token, seconds per prompt token); 0 while unknown.
    """

    def __init__(self, most: int, max_num_seqs: int) -> None:
        self._most = most
        self._max_num_seqs = max_num_seqs
        self._cost = StepCost(_LIFETIME)
        self._observed = 0
        self.speed = 0.0, 0.0

    def tokens(self, running: list[Sequence], *, shared: bool = False) -> int:
        """Most tokens of the next step while these sequences run.

        If tenants share the engine (``shared``), a step has no more tokens than it needs to be efficient, because an
        arriving request waits for the steps in flight.
        """
        step_s, token_s = self.speed
        if not shared or token_s == 0:
            return self._most
        decoding = sum(map(_decodes, running))
        return min(self._most, decoding + max(MIN_PREFILL_TOKENS, int(_EFFICIENT * step_s / token_s)))

    def places(self, running: list[Sequence]) -> int:
        """How many sequences may run in addition to ``running``."""
        return self._max_num_seqs - len(running)

    def join(self, seq: Sequence) -> None:
        """Called when a sequence starts to run."""

    def leave(self, seq: Sequence) -> None:
        """Called when a sequence stops running."""

    def first_token_s(self, tokens: int) -> float:
        """Estimated seconds to compute ``tokens`` prompt tokens; 0 while unknown."""
        step_s, token_s = self.speed
        return step_s + token_s * tokens

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Record the time of a step. Updates ``speed`` every SPEED_EVERY steps."""
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
    """Limits a step, while sequences decode, to the tokens that fit in the shortest latency target among them.

    The target of a sequence is that of its request, or ``target_s`` if the request has none, in seconds between two
    tokens. Each decoding sequence gets one token. Prompts share the rest, at least ``MIN_PREFILL_TOKENS``. The step has
    its full size if no sequence decodes, if there is no target, or before the first step was measured. A request's
    target is ignored if it is shorter than a step of the decoding sequences alone: it cannot be met, and prompts do
    not wait for it.
    """

    def __init__(self, most: int, max_num_seqs: int, target_s: float = math.inf) -> None:
        super().__init__(most, max_num_seqs)
        self._target_s = target_s
        self._targets: dict[Sequence, float] = {}  # of the running sequences whose request has a target

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
    """The time after which a worker is considered hung: many times the time of steps of the same size.

    It is ``most_s`` (engine.step_timeout_s) until a step was measured, and never more.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._cost = StepCost()
        self._learned: dict[int, float] = {}  # seconds, by the bit length of the number of tokens
        self._expected: dict[int, float] = {}  # seconds, by the number of tokens
        self._seen = 0

    def of(self, plan: SchedulerOutput) -> tuple[float, str]:
        """(limit in seconds, the cause of the limit for an error message)."""
        if plan.num_tokens and self._cost.known:
            bits = plan.num_tokens.bit_length()
            if (learned_s := self._learned.get(bits)) is None:
                learned_s = self._learned[bits] = max(_LIMIT_LEAST_S, _LIMIT_TIMES * self._cost.seconds(1 << bits))
            if learned_s < self._most_s:
                return learned_s, "the limit learned for steps of its size"
        return self._most_s, "engine.step_timeout_s"

    def expected_s(self, plan: SchedulerOutput) -> float:
        """Expected seconds of a step; 0 before the first step was measured."""
        tokens = plan.num_tokens
        if not tokens or not self._cost.known:
            return 0.0
        if (expected_s := self._expected.get(tokens)) is None:
            expected_s = self._expected[tokens] = self._cost.seconds(tokens)
        return expected_s

    def observe(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Record the time of a step."""
        tokens = plan.num_tokens + output.drafted_tokens
        if tokens and output.step_s > 0:
            self._cost.observe(tokens, output.step_s)
            self._seen += 1
            if self._seen % _LIMIT_LIFETIME == 1:
                self._learned.clear()
                self._expected.clear()

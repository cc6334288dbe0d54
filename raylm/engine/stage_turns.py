"""StageTurns: divides decoding sequences among the stages of a pipeline, so that all stages compute at once."""

from __future__ import annotations

from typing import NamedTuple

from raylm.engine.sequence import Sequence
from raylm.messages import SchedulerOutput

_ANY = 2**62


class StageTurn(NamedTuple):
    """The decoding sequences of a step: at most ``most`` of those whose last draw was in step ``latest`` or before."""

    latest: int = _ANY
    most: int = _ANY


ALL = StageTurn()


class StageTurns:
    """Lets each decoding sequence rest after a step, until the step has passed all ``stages``.

    The first stage needs the token that the last one draws. If all sequences decoded in the same step, one stage would
    compute at a time. So a step has at most its share of the decoding sequences: with S stages every S-th step has the
    same sequences. Prompts do not rest, because their tokens are known.

    A sequence that gets no blocks leaves its place in the step to the next one. When no step is in flight, none rests,
    so the first running sequence always advances.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages

    def next(self, running: list[Sequence], step: int, seen: int) -> StageTurn:
        """The turn of the next ``step``, while the results up to step ``seen`` are known."""
        if self._stages == 1:
            return ALL
        decoding = sum(seq.num_tokens - seq.num_computed == 1 and seq.num_tokens < seq.limit for seq in running)
        if decoding < 2:
            return ALL
        share = -(-decoding // self._stages)
        return StageTurn(max(seen, step - -(-decoding // share)), share)

    def note(self, plan: SchedulerOutput, sequences: dict[int, Sequence]) -> None:
        """Remember the sequences that draw in a step."""
        if self._stages > 1:
            for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True):
                if samples:
                    sequences[seq_id].last_draw = plan.step

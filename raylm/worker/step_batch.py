"""The sequences of one step in the order of their tokens, and where it draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raylm.messages import SchedulerOutput
from raylm.worker.arrays import IntArray, Ints, Mask, ragged


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes, as columns [S] int64 over its sequences, those with one token first.

    ``rows`` of the batch compute ``counts`` tokens from position ``computed`` on. Behind the last ``draws`` of them a
    token is drawn: 0 within a prompt, else 1 + the draft tokens that stand behind the last known one.
    """

    seq_ids: list[int]
    rows: Ints
    computed: Ints
    counts: Ints
    draws: Ints

    @classmethod
    def of(cls, plan: SchedulerOutput, rows: Ints) -> StepBatch:
        """The step as planned, without drafts."""
        columns = plan.num_computed, plan.num_scheduled, plan.samples
        return cls(plan.seq_ids, rows, *(np.array(column, np.int64) for column in columns))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.tolist())

    @property
    def drafts(self) -> Ints:
        return np.maximum(self.draws - 1, 0)

    def take(self, at: IntArray) -> StepBatch:
        ids = [self.seq_ids[place] for place in at.tolist()]
        return StepBatch(ids, self.rows[at], self.computed[at], self.counts[at], self.draws[at])


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Where a step draws, as columns [D] int64 over the draws, those of a sequence one after the other.

    ``places`` say which sequence of the step, ``offsets`` the how many-th draw of it, ``tokens`` behind which token of
    the step.
    """

    places: Ints
    offsets: Ints
    tokens: Ints

    @classmethod
    def of(cls, step: StepBatch) -> DrawRows:
        places, offsets = ragged(step.draws)
        return cls(places, offsets, (np.cumsum(step.counts) - step.draws)[places] + offsets)

    def accepted(self, matches: Mask) -> Mask:
        """Which draws count [D]: those before the first of their sequence that missed its draft, and that one.

        ``matches`` says which draws are their draft; the last one of a sequence has none and never matches.
        """
        starts = np.flatnonzero(self.offsets == 0)
        first = np.minimum.reduceat(np.where(matches, len(matches), self.offsets), starts)
        return self.offsets <= np.repeat(first, np.diff(starts, append=len(matches)))

"""StepBatch: the sequences of one step in the order of their tokens. DrawRows: the tokens at which it draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raylm.messages import SchedulerOutput
from raylm.worker.arrays import IntArray, Ints, Mask, ragged


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step as columns [S] int64 over its sequences. Sequences with one token come first.

    The row ``rows[i]`` of the batch computes ``counts[i]`` tokens from position ``computed[i]``. A token is drawn after
    each of the last ``draws[i]`` of them: 0 inside a prompt, else 1 + the number of draft tokens after the last known
    token.
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
    """The draws of a step as columns [D] int64. The draws of a sequence are adjacent.

    ``places`` is the index of the sequence in the step, ``offsets`` the number of the draw within the sequence (from
    0), and ``tokens`` the index of the token after which the step draws.
    """

    places: Ints
    offsets: Ints
    tokens: Ints

    @classmethod
    def of(cls, step: StepBatch) -> DrawRows:
        places, offsets = ragged(step.draws)
        return cls(places, offsets, (np.cumsum(step.counts) - step.draws)[places] + offsets)

    def accepted(self, matches: Mask) -> Mask:
        """Which draws count [D]: for each sequence those up to and including the first one that misses its draft.

        ``matches`` says which draws equal their draft. The last draw of a sequence has no draft and never matches.
        """
        starts = np.flatnonzero(self.offsets == 0)
        first = np.minimum.reduceat(np.where(matches, len(matches), self.offsets), starts)
        return self.offsets <= np.repeat(first, np.diff(starts, append=len(matches)))

"""StepPlan: what the Scheduler draws up in one step, its budget and its columns for the workers; dies with the step."""

from __future__ import annotations

from raylm.engine.sequence import Sequence
from raylm.messages import NewSequence, SchedulerOutput


class StepPlan:
    """The budget that is left of a step, and the rows scheduled so far.

    ``tokens`` may still be computed and ``seats`` sequences may still join. Rows of one token stand before longer
    ones; ``mute`` are the one-token rows that draw nothing, ``grown`` the blocks by which one-token rows grew.
    """

    __slots__ = ("chunks", "computed", "grown", "ids", "mute", "new", "seats", "tokens")

    def __init__(self, tokens: int, seats: int) -> None:
        self.tokens = tokens
        self.seats = seats
        self.ids: list[int] = []
        self.computed: list[int] = []
        self.mute: list[int] = []
        self.chunks: list[tuple[int, int, int, bool]] = []
        self.grown: dict[int, list[int]] = {}
        self.new: list[NewSequence] = []

    def add(self, seq: Sequence, count: int) -> None:
        """Let ``seq`` compute its next ``count`` tokens, and draw one if they are its last ones."""
        computed, known = seq.num_computed, seq.num_tokens
        samples = computed + count == known
        seq.num_computed = computed + count
        seq.num_tokens = known + samples
        self.tokens -= count
        if count > 1:
            self.chunks.append((seq.id, computed, count, samples))
            return
        if not samples:
            self.mute.append(len(self.ids))
        self.ids.append(seq.id)
        self.computed.append(computed)

    def close(self) -> None:
        """Let no sequence join this step any more."""
        self.seats = 0

    def columns(self, step: int, finished: list[int]) -> SchedulerOutput:
        """The step as the workers get it."""
        singles = len(self.ids)
        samples = [True] * singles
        for row in self.mute:
            samples[row] = False
        chunk_ids, chunk_computed, counts, draws = zip(*self.chunks, strict=True) if self.chunks else ((), (), (), ())
        block_counts = [0] * (singles + len(chunk_ids))
        for row, blocks in self.grown.items():
            block_counts[row] = len(blocks)
        return SchedulerOutput(
            step=step,
            finished=finished,
            new=self.new,
            seq_ids=[*self.ids, *chunk_ids],
            num_computed=[*self.computed, *chunk_computed],
            num_scheduled=[1] * singles + list(counts),
            samples=samples + list(draws),
            new_block_counts=block_counts,
            new_block_ids=[block for blocks in self.grown.values() for block in blocks],
        )

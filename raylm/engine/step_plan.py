"""StepPlan: the plan of one step: the remaining budget and the columns for the workers. Lives as long as the step."""

from __future__ import annotations

from collections.abc import Callable, Collection

from raylm.engine.sequence import Sequence
from raylm.engine.stage_turns import ALL, StageTurn
from raylm.messages import NewSequence, SchedulerOutput

Reserve = Callable[[Sequence, int, "StepPlan"], bool]
_DESCRIBED = 8  # a prompt token with requested log-probabilities costs as much as 8 tokens: its logits are computed too


class StepPlan:
    """The remaining budget of a step and the rows scheduled so far.

    The budget: ``tokens`` to compute, and ``max_new`` sequences that may join. Rows of one token come before longer
    rows. Nearly all of them belong to decoding sequences: they compute the last known token and draw the next one.
    ``_silent`` lists the rows of one token that draw nothing. ``_grown`` maps a row to the new blocks of its table.
    """

    __slots__ = ("_chunks", "_computed", "_grown", "_ids", "_silent", "max_new", "new", "tokens")

    def __init__(self, tokens: int, max_new: int) -> None:
        self.tokens = tokens
        self.max_new = max_new
        self.new: list[NewSequence] = []
        self._ids: list[int] = []
        self._computed: list[int] = []
        self._silent: list[int] = []
        self._grown: dict[int, list[int]] = {}
        self._chunks: list[tuple[int, int, int, bool]] = []

    @property
    def empty(self) -> bool:
        return not self._ids and not self._chunks

    def add_running(
        self,
        running: list[Sequence],
        reserve_every: int,
        reserve: Reserve,
        turn: StageTurn = ALL,
        yielding: Collection[Sequence] = (),
    ) -> list[Sequence]:
        """Add the running sequences, but not the prompts in ``yielding``, in the order of their rank.

        A chunk of a prompt leaves one token of the budget for each sequence after it. A decoding sequence requests
        blocks by ``reserve`` when it has computed a multiple of ``reserve_every`` tokens. If ``reserve`` returns False,
        the sequence skips this step, as do decoding sequences that are not in the ``turn``. ``reserve`` may remove
        sequences after ``place`` from ``running``.

        Returns the sequences of which a chunk was added.
        """
        ids, computed_tokens, tokens = self._ids, self._computed, self.tokens
        chunked, (latest, left) = [], turn
        for place, seq in enumerate(running):
            computed, known = seq.num_computed, seq.num_tokens
            if known >= seq.limit or tokens <= 0:
                continue
            if known - computed > 1:
                if seq in yielding:
                    continue
                tokens -= self._add_chunk(seq, max(1, tokens - (len(running) - place - 1)))
                chunked.append(seq)
            elif left > 0 and seq.last_draw <= latest and (computed % reserve_every or reserve(seq, place, self)):
                left -= 1
                ids.append(seq.id)
                computed_tokens.append(computed)
                seq.num_computed = known
                seq.num_tokens = known + 1
                tokens -= 1
        self.tokens = tokens
        return chunked

    def add_prompt(self, seq: Sequence) -> None:
        """Compute as many tokens of a running prompt as the budget allows."""
        self.tokens -= self._add_chunk(seq, self.tokens)

    def add_new(self, seq: Sequence, block_ids: list[int]) -> None:
        """Add a sequence that has no row in the worker, and compute as many of its tokens as the budget allows."""
        self.max_new -= 1
        self.new.append(seq.as_new(block_ids))
        self.tokens -= self._add_chunk(seq, self.tokens)

    def grow(self, blocks: list[int]) -> None:
        """Append blocks to the table of the sequence whose row is added next."""
        if blocks:
            self._grown[len(self._ids)] = blocks

    def close(self) -> None:
        """Let no further sequence join this step."""
        self.max_new = 0

    def columns(self, step: int, finished: list[int]) -> SchedulerOutput:
        singles = len(self._ids)
        samples = [True] * singles
        for row in self._silent:
            samples[row] = False
        chunk_ids, chunk_computed, counts, draws = zip(*self._chunks, strict=True) if self._chunks else ((), (), (), ())
        block_counts = [0] * (singles + len(chunk_ids))
        for row, blocks in self._grown.items():
            block_counts[row] = len(blocks)
        return SchedulerOutput(
            step=step,
            finished=finished,
            new=self.new,
            seq_ids=[*self._ids, *chunk_ids],
            num_computed=[*self._computed, *chunk_computed],
            num_scheduled=[1] * singles + list(counts),
            samples=samples + list(draws),
            new_block_counts=block_counts,
            new_block_ids=[block for blocks in self._grown.values() for block in blocks],
        )

    def _add_chunk(self, seq: Sequence, most: int) -> int:
        """Compute the next tokens of ``seq``, and draw one if they reach its last known token.

        ``most`` is the budget for this sequence in tokens. Returns how much of it is used.
        """
        computed, known = seq.num_computed, seq.num_tokens
        each = 1 if seq.prompt_logprobs is None else _DESCRIBED
        count = min(known - computed, max(1, most // each))
        samples = computed + count == known
        seq.num_computed = computed + count
        seq.num_tokens = known + samples
        if count > 1:
            self._chunks.append((seq.id, computed, count, samples))
            return min(count * each, most)
        if not samples:
            self._silent.append(len(self._ids))
        self._ids.append(seq.id)
        self._computed.append(computed)
        return min(count * each, most)

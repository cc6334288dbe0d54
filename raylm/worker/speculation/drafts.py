"""What each sequence is likely to go on with: what came after its last tokens before, in its text or in answers.

The work is done by raylm/native/src/drafts.cpp, once a step for all rows.
"""

from __future__ import annotations

from ctypes import byref

import numpy as np

from raylm.native import BatchColumns, DraftColumns, drafts_library
from raylm.step_cost import StepCost
from raylm.worker.input_batch import InputBatch
from raylm.worker.step_batch import StepBatch

# Entries of 8 bytes, of each of two tables, and tokens of 12 bytes: 40 MB with what all rows have.
_INDEX_BITS, _RING_BITS = 21, 19
_SHORTEST_ANSWER = 8
_MOST_KNOTS = 128  # four an octave, up to two million tokens, and four at the ends


class Drafts:
    """For each row the tokens that would come if it went on repeating a text, how often that was right, and which pay.

    Of the longest match of a row's last 16, 8, 4, 3, 2 tokens or 1 those are drafted that followed it most of the last
    times: every occurrence votes for what came after it, and the latest that agrees stands for all. Which n-grams came
    is kept for the rows' own texts, and for recent answers by owner.

    The chance that a draft holds is estimated for the row, with what holds for all rows of the same kind of match
    as what is expected beforehand.

    Columns by row: ``tokens`` [max_num_seqs, most] int32, ``counts`` int32, and ``chances`` float64, of the next draft.
    Columns by place in the step [max_num_seqs] int64, valid from ``begin`` to the next: ``rows``, ``step_counts`` of
    tokens without drafts, which ``may`` have drafts, and ``added``.

    Raises:
        NativeError: it cannot be compiled here.
    """

    def __init__(
        self,
        max_num_seqs: int,
        most: int,
        block_size: int,
        index_bits: int = _INDEX_BITS,
        ring_bits: int = _RING_BITS,
    ) -> None:
        self.tokens = np.zeros((max_num_seqs, most), np.int32)
        self.counts = np.zeros(max_num_seqs, np.int32)
        self.chances = np.zeros(max_num_seqs)
        self._places = np.zeros((7, max_num_seqs), np.int64)
        self.rows, self._computed, self.step_counts, self._draws, self.may, self.added, self._order = self._places
        self._curve: object = None
        self._knots = np.zeros((2, _MOST_KNOTS))
        self._knots_at = [int(column.ctypes.data) for column in self._knots]
        self._batch: InputBatch | None = None
        self._library = drafts_library()
        columns = [column.ctypes.data for column in (self.tokens, self.counts, self.chances, *self._places)]
        shape = DraftColumns(max_num_seqs, most, block_size, index_bits, ring_bits, 0, *columns)
        self._handle = self._library.raylm_drafts_new(byref(shape))

    def __del__(self) -> None:
        if handle := self.__dict__.get("_handle"):
            self._library.raylm_drafts_free(handle)

    def forget(self, row: int, owner: int) -> None:
        """Another sequence has the row, for which the answers of ``owner`` may be looked at."""
        self._library.raylm_drafts_forget(self._handle, row, owner)

    def keep(self, row: int, batch: InputBatch) -> None:
        """The sequence of the row has ended: its answer may be a draft for others of its owner."""
        before = int(batch.num_prompt_tokens[row])
        if batch.num_tokens[row] - before >= _SHORTEST_ANSWER:
            self._bind(batch)
            self._library.raylm_drafts_keep(self._handle, row, before)

    def begin(self, step: StepBatch, batch: InputBatch) -> int:
        """Take a step as it really is: rows that decode where they are, and not at their limit; its places."""
        self._bind(batch)
        count = len(step.seq_ids)
        self.rows[:count], self._computed[:count] = step.rows, step.computed
        self.step_counts[:count], self._draws[:count] = step.counts, step.draws
        return int(self._library.raylm_drafts_prepare(self._handle, count))

    def renew(self, count: int) -> bool:
        """Learn from what came since the last drafts, and make new ones of the step's places that ``may`` have some.

        Whether any of them has a chance.
        """
        return bool(self._library.raylm_drafts_renew(self._handle, count))

    def force(self, row: int, tokens: list[int]) -> None:
        """Nothing but these ``tokens`` may come, or another spelling of them."""
        column = np.array(tokens, np.int32)
        self._library.raylm_drafts_force(self._handle, row, column.ctypes.data, len(column))

    def cut(self, row: int, count: int) -> None:
        """Only so many of the row's drafts may come."""
        self._library.raylm_drafts_cut(self._handle, row, count)

    def choose(self, count: int, most: int, cost: StepCost) -> int:
        """Write the drafts that raise the tokens per second of the step the most behind the rows' tokens; how many.

        ``added`` has them by place. There are ``most`` at most, and none where none raise it.
        """
        return int(self._library.raylm_drafts_choose(self._handle, count, most, self._learn(cost), *self._knots_at))

    def renew_and_choose(self, count: int, most: int, cost: StepCost) -> int:
        """As one after the other."""
        knots = self._learn(cost)
        return int(self._library.raylm_drafts_renew_and_choose(self._handle, count, most, knots, *self._knots_at))

    def grown(self, step: StepBatch, count: int) -> StepBatch:
        """The step that ``begin`` took with what was ``added``, those with one token first."""
        self._library.raylm_drafts_arrange(self._handle, count)
        return self.without(step, count)

    def without(self, step: StepBatch, count: int) -> StepBatch:
        """The step that ``begin`` took with so many places."""
        order = self._order[:count].tolist()
        columns = self._places[:4, :count].copy()
        return StepBatch([step.seq_ids[place] for place in order], *columns)

    def _learn(self, cost: StepCost) -> int:
        """Have the knots of what steps cost; how many there are."""
        curve = cost.curve()
        if curve is not self._curve:
            self._curve = curve
            self._knots[:, : len(curve[0])] = curve
        return len(curve[0])

    def _bind(self, batch: InputBatch) -> None:
        if batch is self._batch:
            return
        self._batch = batch
        columns = batch.token_ids, batch.num_tokens, batch.limits, batch.num_blocks
        where = BatchColumns(batch.token_ids.shape[1], *(column.ctypes.data for column in columns))
        self._library.raylm_drafts_bind(self._handle, byref(where))

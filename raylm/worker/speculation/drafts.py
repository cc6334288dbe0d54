"""Drafts: predicts the next tokens of a sequence from what followed its last tokens before, in its text or in answers.

raylm/native/src/drafts.cpp does the work, once a step for all rows.
"""

from __future__ import annotations

from ctypes import byref

import numpy as np

from raylm.native import BatchColumns, DraftColumns, drafts_library
from raylm.step_cost import StepCost
from raylm.worker.input_batch import InputBatch
from raylm.worker.step_batch import StepBatch

# Bits of the number of table entries (two tables, 8 bytes an entry) and of ring tokens (12 bytes): 40 MB with all rows.
_INDEX_BITS, _RING_BITS = 21, 19
_SHORTEST_ANSWER = 8
_MOST_KNOTS = 128  # four per octave up to two million tokens, and four at the ends


class Drafts:
    """Drafts tokens for each row by repeating earlier text, estimates their chances, and selects the drafts that pay.

    The longest match of a row's last 16, 8, 4, 3, 2 or 1 tokens is looked up. The draft is the continuation that
    followed this match in most of its last occurrences: each occurrence votes for its next token, and the latest
    occurrence that agrees with the majority provides the tokens. N-grams are stored for the rows' own texts, and for
    recent answers by owner.

    The chance that a draft is accepted is estimated for each row; the prior is the acceptance over all rows for the
    same kind of match.

    Columns by row, for the next draft: ``tokens`` [max_num_seqs, most] int32, ``counts`` int32, ``chances`` float64.
    Columns by place in the step [max_num_seqs] int64, valid from one ``begin`` to the next: ``rows``; ``step_counts``,
    the tokens without drafts; ``may``, whether drafts are allowed; and ``added``, the number of drafts.

    Raises:
        NativeError: the native code cannot be compiled on this machine.
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
        """Assign the row to a new sequence, which may use the answers of ``owner``."""
        self._library.raylm_drafts_forget(self._handle, row, owner)

    def keep(self, row: int, batch: InputBatch) -> None:
        """Called when the sequence of the row has ended: its answer becomes a source of drafts for its owner."""
        before = int(batch.num_prompt_tokens[row])
        if batch.num_tokens[row] - before >= _SHORTEST_ANSWER:
            self._bind(batch)
            self._library.raylm_drafts_keep(self._handle, row, before)

    def begin(self, step: StepBatch, batch: InputBatch) -> int:
        """Begin a step: decoding rows continue at their real position, and rows at their limit leave.

        Returns the number of places.
        """
        self._bind(batch)
        count = len(step.seq_ids)
        self.rows[:count], self._computed[:count] = step.rows, step.computed
        self.step_counts[:count], self._draws[:count] = step.counts, step.draws
        return int(self._library.raylm_drafts_prepare(self._handle, count))

    def renew(self, count: int) -> bool:
        """Learn from the tokens since the last drafts, and draft for the places of the step where ``may`` allows it.

        Returns whether any draft has a chance.
        """
        return bool(self._library.raylm_drafts_renew(self._handle, count))

    def force(self, row: int, tokens: list[int]) -> None:
        """Draft ``tokens`` for the row: its grammar allows no other text, but perhaps another tokenization of it."""
        column = np.array(tokens, np.int32)
        self._library.raylm_drafts_force(self._handle, row, column.ctypes.data, len(column))

    def cut(self, row: int, count: int) -> None:
        """Keep only the first ``count`` drafts of the row."""
        self._library.raylm_drafts_cut(self._handle, row, count)

    def choose(self, count: int, most: int, cost: StepCost) -> int:
        """Write the drafts that raise the step's tokens per second most after the rows' tokens, at most ``most``.

        ``added`` has their number by place. Returns the total; 0 if no draft raises the throughput.
        """
        return int(self._library.raylm_drafts_choose(self._handle, count, most, self._learn(cost), *self._knots_at))

    def renew_and_choose(self, count: int, most: int, cost: StepCost) -> int:
        """``renew`` and then ``choose``, in one native call."""
        knots = self._learn(cost)
        return int(self._library.raylm_drafts_renew_and_choose(self._handle, count, most, knots, *self._knots_at))

    def grown(self, step: StepBatch, count: int) -> StepBatch:
        """The step of ``begin`` with the ``added`` drafts; sequences with one token come first."""
        self._library.raylm_drafts_arrange(self._handle, count)
        return self.without(step, count)

    def without(self, step: StepBatch, count: int) -> StepBatch:
        """The step of ``begin`` without drafts; ``count`` is the number of its places."""
        order = self._order[:count].tolist()
        columns = self._places[:4, :count].copy()
        return StepBatch([step.seq_ids[place] for place in order], *columns)

    def _learn(self, cost: StepCost) -> int:
        """Copy the knots of the cost curve for the native code if they changed. Returns their number."""
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

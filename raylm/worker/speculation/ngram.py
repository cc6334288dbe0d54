"""What each sequence is likely to repeat of itself (prompt lookup): the tokens that came after its last n-gram."""

from __future__ import annotations

import numpy as np

from raylm.worker.arrays import Floats, IntArray, Ints, ragged

# Level 0, 1, 2: matches of 2, 3, 4 tokens, which look up to 3 tokens back from their end.
_LEVELS = np.arange(3)
_BACK = np.arange(4)
_MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)[:, None]
_MOST_SLOTS = 1 << 14


class NGramIndex:
    """Where the last 2, 3 and 4 tokens of a sequence stood before, the last time; columns over all rows.

    Three hash tables a row hold the positions of the n-grams' ends. Nothing is ever cleared: whatever a table says is
    compared with the row's tokens, so that an entry of another n-gram, or of the row's last owner, is no match. Update
    and search take 15 calls of numpy each, however many rows and tokens there are.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        bits = min(_MOST_SLOTS, max(1024, max_model_len)).bit_length() - 1
        self._shift = np.uint32(32 - bits)
        self._ends = np.zeros((len(_LEVELS), max_num_seqs, 1 << bits), np.int32)
        self._indexed = np.zeros(max_num_seqs, np.int64)

    def forget(self, row: int) -> None:
        self._indexed[row] = 0

    def search(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> tuple[Ints, Ints]:
        """How far back, in tokens, the longest match of each row's end lies (0: none), and its length; [R] both.

        ``token_ids`` is [max_num_seqs, max_model_len], valid up to ``num_tokens`` [R] in the distinct ``rows`` [R].
        """
        last = num_tokens - 1
        self._update(token_ids, rows, last)
        tail = token_ids[rows, last - _BACK[:, None]]
        ends = self._ends[_LEVELS[:, None], rows, self._slots(tail)].astype(np.int64)
        there = token_ids[rows, ends - _BACK[:, None, None]]
        equal = np.logical_and.accumulate(there == tail[:, None], axis=0)[_LEVELS + 1, _LEVELS]
        equal &= (ends > _LEVELS[:, None]) & (ends < last)
        level = len(_LEVELS) - 1 - equal[::-1].argmax(axis=0)
        lags = (last - ends[level, np.arange(len(rows))]) * equal.any(axis=0)
        return lags, level + 2

    def _update(self, token_ids: IntArray, rows: Ints, last: Ints) -> None:
        """Enter the n-grams that end before the ``last`` tokens; of equal ones the later stays."""
        starts = self._indexed[rows]
        counts = np.maximum(last - starts, 0)
        self._indexed[rows] = starts + counts
        places, offsets = ragged(counts)
        owners, ends = rows[places], starts[places] + offsets
        slots = self._slots(token_ids[owners, ends - _BACK[:, None]])
        self._ends[_LEVELS[:, None], owners, slots] = ends

    def _slots(self, tokens: IntArray) -> Ints:
        """Slots [3, N] of the 2-, 3- and 4-grams whose last tokens are ``tokens[0]``, those before them [1] .. [3]."""
        hashes = np.cumsum(tokens.astype(np.uint32) * _MULTIPLIERS, axis=0, dtype=np.uint32)[1:]
        hashes ^= hashes >> np.uint32(15)
        hashes *= np.uint32(0x2C1B3C6D)
        return (hashes >> self._shift).astype(np.int64)


class NGramDrafts:
    """For each row the tokens that would come if it went on repeating itself, and how often that was right.

    A row copies from a constant distance, its *lag*, as long as it proves right; then the index is asked again. Drafts
    are looked at whether or not they were verified in a step: a row learns what they are worth at no cost.

    The chance that a draft holds is estimated for the row, with what holds for all rows of the same kind of match
    (none kept: 0; of 2, 3, 4 tokens; kept: 5) as what is expected beforehand.
    """

    KEPT = 5
    _DECAY = 0.8
    _WEIGHT = 3.0
    _MEMORY = 256.0

    def __init__(self, index: NGramIndex, max_num_seqs: int, most: int) -> None:
        self.tokens = np.zeros((max_num_seqs, most), np.int32)
        self._index = index
        self._ahead = np.arange(most)
        self._lags = np.zeros(max_num_seqs, np.int64)
        self._kinds = np.zeros(max_num_seqs, np.int64)
        self._made_at = np.zeros(max_num_seqs, np.int64)
        self._right = np.zeros(max_num_seqs)
        self._tested = np.zeros(max_num_seqs)
        self._right_of_kind = np.array([0.0, 0.0, 3.0, 5.0, 6.0, 9.0])
        self._tested_of_kind = np.full(6, 10.0)

    def forget(self, row: int) -> None:
        self._index.forget(row)
        self._lags[row] = 0
        self._right[row] = self._tested[row] = 0

    def renew(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> Floats:
        """Learn from what came since the last drafts, and make new ones; returns the chance of each row's next, [R].

        The chance is 0 where there is nothing to repeat. ``token_ids`` is valid up to ``num_tokens`` [R] of the
        distinct ``rows`` [R].
        """
        self._learn(token_ids, rows, num_tokens)
        lost = self._lags[rows] == 0
        if lost.any():
            lags, lengths = self._index.search(token_ids, rows[lost], num_tokens[lost])
            self._lags[rows[lost]], self._kinds[rows[lost]] = lags, lengths * (lags > 0)
        lags = self._lags[rows]
        sources = (num_tokens - lags)[:, None] + self._ahead % np.maximum(lags, 1)[:, None]
        self.tokens[rows] = token_ids[rows[:, None], np.minimum(sources, num_tokens[:, None] - 1)]
        self._made_at[rows] = num_tokens
        return self._chances(rows)

    def _learn(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> None:
        """Compare the drafts with what came, up to the first that was wrong; rows without a lag have none."""
        made_at = self._made_at[rows]
        came = np.minimum(num_tokens - made_at, len(self._ahead))
        where = np.minimum(made_at[:, None] + self._ahead, num_tokens[:, None] - 1)
        equal = (token_ids[rows[:, None], where] == self.tokens[rows]) & (self._ahead < came[:, None])
        right = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        drafted = self._lags[rows] > 0
        tested = np.minimum(right + 1, came) * drafted
        right *= drafted
        self._right[rows] = self._right[rows] * self._DECAY + right
        self._tested[rows] = self._tested[rows] * self._DECAY + tested
        self._right_of_kind += np.bincount(self._kinds[rows], right, minlength=6)
        self._tested_of_kind += np.bincount(self._kinds[rows], tested, minlength=6)
        many = self._tested_of_kind > self._MEMORY
        self._right_of_kind[many] *= 0.5
        self._tested_of_kind[many] *= 0.5
        kept = drafted & (right == came)
        self._lags[rows] *= kept
        self._kinds[rows] = kept * self.KEPT

    def _chances(self, rows: Ints) -> Floats:
        expected = (self._right_of_kind / self._tested_of_kind)[self._kinds[rows]]
        chances = (self._right[rows] + self._WEIGHT * expected) / (self._tested[rows] + self._WEIGHT)
        return np.where(self._lags[rows] > 0, chances, 0.0)

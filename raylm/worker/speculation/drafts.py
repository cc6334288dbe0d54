"""What each sequence is likely to go on with: what came after its last tokens before, in its text or in answers."""

from __future__ import annotations

import numpy as np

from raylm.worker.arrays import Floats, IntArray, Ints, Mask
from raylm.worker.speculation.ngram import LENGTHS, AnswerHistory, NGramIndex

# Kinds of drafts: none, by the level of a match in the own text, kept from there, taken up again after a token that
# was wrong, by the level of a match in an answer, kept from there, all that the form of the answer leaves.
_OWN, _KEPT, _RESUMED = 1, 1 + len(LENGTHS), 2 + len(LENGTHS)
_ANSWER, _ANSWER_KEPT, _FORCED = 3 + len(LENGTHS), 3 + 2 * len(LENGTHS), 4 + 2 * len(LENGTHS)
_SHORTEST_ANSWER = 8
# Of ten drafts of each kind so many are expected to hold before any was seen.
_EXPECTED = [0.0, 3.0, 5.0, 6.0, 7.5, 8.0, 9.0, 2.0, 2.0, 3.5, 5.0, 7.0, 8.0, 9.0, 9.5]


class Drafts:
    """For each row the tokens that would come if it went on repeating a text, and how often that was right.

    A row copies from its own text at a constant distance, its *lag*, or from an answer of before, as long as it proves
    right; then the indexes are asked again. Drafts are looked at whether or not they were verified in a step: a row
    learns what they are worth at no cost.

    The chance that a draft holds is estimated for the row, with what holds for all rows of the same kind of match
    as what is expected beforehand.
    """

    _DECAY = 0.8
    _WEIGHT = 3.0
    _MEMORY = 256.0

    def __init__(self, index: NGramIndex, history: AnswerHistory, max_num_seqs: int, most: int) -> None:
        self.tokens = np.zeros((max_num_seqs, most), np.int32)
        self.counts = np.zeros(max_num_seqs, np.int64)
        self._index, self._history = index, history
        self._ahead = np.arange(most)
        self._owners = np.zeros(max_num_seqs, np.int64)
        self._kinds = np.zeros(max_num_seqs, np.int64)
        self._lags = np.zeros(max_num_seqs, np.int64)
        self._sources = np.zeros(max_num_seqs, np.int64)
        self._made_at = np.zeros(max_num_seqs, np.int64)
        self._right = np.zeros(max_num_seqs)
        self._tested = np.zeros(max_num_seqs)
        self._right_of_kind = np.array(_EXPECTED)
        self._tested_of_kind = np.full(len(_EXPECTED), 10.0)

    def forget(self, row: int, owner: int) -> None:
        """Another sequence has the row, for which the answers of ``owner`` may be looked at."""
        self._index.forget(row)
        self._owners[row] = owner
        self._kinds[row] = self._lags[row] = self.counts[row] = 0
        self._right[row] = self._tested[row] = 0

    def keep(self, row: int, tokens: IntArray, num_prompt_tokens: int) -> None:
        """The sequence of the row has ended with these ``tokens``."""
        if len(tokens) - num_prompt_tokens < _SHORTEST_ANSWER:
            return
        self._history.append(tokens, num_prompt_tokens, int(self._owners[row]))

    def renew(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> None:
        """Learn from what came since the last drafts, and make new ones: ``tokens`` and ``counts`` of the rows.

        ``token_ids`` is valid up to ``num_tokens`` [R] of the distinct ``rows`` [R].
        """
        self._learn(token_ids, rows, num_tokens)
        if (lost := self._kinds[rows] == 0).any():
            self._find(token_ids, rows[lost], num_tokens[lost])
        kinds, lags = self._kinds[rows], self._lags[rows]
        sources = (num_tokens - lags)[:, None] + self._ahead % np.maximum(lags, 1)[:, None]
        self.tokens[rows] = token_ids[rows[:, None], np.minimum(sources, num_tokens[:, None] - 1)]
        self.counts[rows] = len(self._ahead) * (kinds > 0)
        if (answers := kinds >= _ANSWER).any():
            some = rows[answers]
            read = self._history.read(self._sources[some], self._owners[some], len(self._ahead))
            self.tokens[some], self.counts[some] = read
        self._made_at[rows] = num_tokens

    def force(self, row: int, tokens: list[int]) -> None:
        """Nothing but these ``tokens`` may come, or another spelling of them."""
        self.counts[row] = min(len(tokens), len(self._ahead))
        self.tokens[row, : self.counts[row]] = tokens[: self.counts[row]]
        self._kinds[row] = _FORCED

    def cut(self, row: int, count: int) -> None:
        """Only so many of the row's drafts may come."""
        self.counts[row] = count
        self._kinds[row] *= count > 0

    def chances(self, rows: Ints) -> Floats:
        """For each row how likely its next draft is right, [R]; 0 where there is none."""
        kinds = self._kinds[rows]
        expected = (self._right_of_kind / self._tested_of_kind)[kinds]
        chances = (self._right[rows] + self._WEIGHT * expected) / (self._tested[rows] + self._WEIGHT)
        return np.where(kinds > 0, chances, 0.0)

    def _find(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> None:
        """Choose for rows without drafts what is the likeliest to be right."""
        lags, level = self._index.search(token_ids, rows, num_tokens)
        sources, answer_level = self._history.search(token_ids, rows, num_tokens, self._owners[rows])
        expected = self._right_of_kind / self._tested_of_kind
        own = np.where(lags > 0, _OWN + level, np.where(self._lags[rows] > 0, _RESUMED, 0))
        answer = np.where(sources > 0, _ANSWER + answer_level, 0)
        kinds = np.where(expected[answer] > expected[own], answer, own)
        self._lags[rows] = np.where(kinds == _RESUMED, self._lags[rows], np.where(kinds < _ANSWER, lags, 0))
        self._sources[rows] = sources
        self._kinds[rows] = kinds

    def _learn(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> None:
        """Compare the drafts with what came, up to the first that was wrong."""
        made_at = self._made_at[rows]
        new = np.maximum(num_tokens - made_at, 0)
        came = np.minimum(new, self.counts[rows])
        where = np.minimum(made_at[:, None] + self._ahead, num_tokens[:, None] - 1)
        equal = (token_ids[rows[:, None], where] == self.tokens[rows]) & (self._ahead < came[:, None])
        right = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        tested = np.minimum(right + 1, came)
        kinds = self._kinds[rows]
        self._right[rows] = self._right[rows] * self._DECAY + right
        self._tested[rows] = self._tested[rows] * self._DECAY + tested
        self._right_of_kind += np.bincount(kinds, right, minlength=len(_EXPECTED))
        self._tested_of_kind += np.bincount(kinds, tested, minlength=len(_EXPECTED))
        many = self._tested_of_kind > self._MEMORY
        self._right_of_kind[many] *= 0.5
        self._tested_of_kind[many] *= 0.5
        self._go_on(rows, new, kinds, (kinds > 0) & (right == came))

    def _go_on(self, rows: Ints, new: Ints, kinds: Ints, held: Mask) -> None:
        """Rows whose drafts ``held`` go on copying; a lag that was wrong once after it was right is kept."""
        from_answer = (kinds >= _ANSWER) & (kinds < _FORCED)
        held = (
            held
            & (kinds != _FORCED)
            & ~(from_answer & (new >= self.counts[rows]) & (self.counts[rows] < len(self._ahead)))
        )
        self._kinds[rows] = np.where(held, np.where(from_answer, _ANSWER_KEPT, _KEPT), 0)
        self._sources[rows] += new
        self._lags[rows] *= held | (kinds == _KEPT) | (kinds == _FORCED)

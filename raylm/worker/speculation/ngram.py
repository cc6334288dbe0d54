"""Where the last tokens of a text stood before: in the text itself, and in recent answers."""

from __future__ import annotations

import numpy as np

from raylm.worker.arrays import IntArray, Ints, Mask, ragged

LENGTHS = np.array([2, 3, 4, 8, 16])
"""Tokens that a match may have, by its level."""
_LEVELS = np.arange(len(LENGTHS))
_BACK = np.arange(LENGTHS[-1])
_MULTIPLIERS = np.cumprod(np.full((len(_BACK), 1), 0x9E3779B1, np.uint32), axis=0, dtype=np.uint32)
_MOST_BYTES = 24 << 20  # of the tables of an index
_MOST_BITS = 14
_NOBODY = -1


class NGramIndex:
    """Where the last 2 to 16 tokens of a sequence stood before, the last time; columns over all rows.

    A hash table for each length and row holds the positions of the n-grams' ends. Nothing is ever cleared: whatever a
    table says is compared with the row's tokens, so that an entry of another n-gram, or of the row's last owner, is no
    match. Update and search take 15 calls of numpy each, however many rows and tokens there are.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        most = _MOST_BYTES // (4 * len(LENGTHS) * max_num_seqs)
        bits = min(_MOST_BITS, max(1024, min(max_model_len, most)).bit_length() - 1)
        self._shift = np.uint32(32 - bits)
        self._ends = np.zeros((len(LENGTHS), max_num_seqs, 1 << bits), np.int32)
        self._indexed = np.zeros(max_num_seqs, np.int64)

    def forget(self, row: int) -> None:
        self._indexed[row] = 0

    def search(self, token_ids: IntArray, rows: Ints, num_tokens: Ints) -> tuple[Ints, Ints]:
        """How far back, in tokens, the longest match of each row's end lies (0: none), and its level; [R] both.

        ``token_ids`` is [max_num_seqs, max_model_len], valid up to ``num_tokens`` [R] in the distinct ``rows`` [R].
        """
        last = num_tokens - 1
        self._update(token_ids, rows, last)
        tail = token_ids[rows, last - _BACK[:, None]]
        ends = self._ends[_LEVELS[:, None], rows, self._slots(tail)].astype(np.int64)
        there = token_ids[rows, ends - _BACK[:, None, None]]
        equal = _equal(there, tail)
        equal &= (ends >= LENGTHS[:, None] - 1) & (ends < last)
        level = _longest(equal)
        return (last - ends[level, np.arange(len(rows))]) * equal.any(axis=0), level

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
        return (_hashes(tokens) >> self._shift).astype(np.int64)


class AnswerHistory:
    """The tokens of recent answers, in a ring, and where their n-grams ended, the last time.

    Every answer has an ``owner``, a number; what is found is of the same owner. Positions count all tokens ever
    written; those that are overwritten are owned by who owns what stands there now, or by nobody.
    """

    def __init__(self, size: int = 1 << 19, bits: int = 19) -> None:
        self._shift = np.uint32(32 - bits)
        self._ends = np.zeros((len(LENGTHS), 1 << bits), np.int64)
        self._tokens = np.zeros(size, np.int32)
        self._owners = np.full(size, _NOBODY, np.int64)
        self._written = len(_BACK)

    def append(self, tokens: IntArray, num_before: int, owner: int) -> None:
        """Keep an answer, the last of the ``tokens``, of which ``num_before`` came before it.

        Of the prompt only as much is kept as the first tokens of the answer are found by.
        """
        tokens = tokens[max(0, num_before - len(_BACK)) :][-len(self._tokens) // 2 :]
        at = self._written + np.arange(len(tokens))
        self._tokens[at % len(self._tokens)] = tokens
        self._owners[at % len(self._tokens)] = owner
        end = (self._written + len(tokens)) % len(self._tokens)
        self._tokens[end] = self._owners[end] = _NOBODY
        self._written += len(tokens) + 1
        ends = at[LENGTHS[0] - 1 : -1]  # behind the last token there is nothing to copy
        back = self._tokens[(ends - _BACK[:, None]) % len(self._tokens)]
        self._ends[_LEVELS[:, None], self._slots(back, np.full(len(ends), owner))] = ends

    def search(self, token_ids: IntArray, rows: Ints, num_tokens: Ints, owners: Ints) -> tuple[Ints, Ints]:
        """Where what follows the longest match of each row's end begins (0: no match), and its level; [R] both.

        ``owners`` [R] are whose answers may be looked at; for the rest see NGramIndex.
        """
        last = num_tokens - 1
        tail = token_ids[rows, last - _BACK[:, None]]
        ends = self._ends[_LEVELS[:, None], self._slots(tail, owners)]
        at = (ends - _BACK[:, None, None]) % len(self._tokens)
        equal = _equal(np.where(self._owners[at] == owners, self._tokens[at], _NOBODY), tail)
        equal &= (ends > self._written - len(self._tokens)) & (num_tokens >= LENGTHS[:, None])
        level = _longest(equal)
        return (ends[level, np.arange(len(rows))] + 1) * equal.any(axis=0), level

    def read(self, starts: Ints, owners: Ints, most: int) -> tuple[IntArray, Ints]:
        """``most`` tokens [R, most] from each of the ``starts`` on, and how many of them belong to the answer [R]."""
        at = (starts[:, None] + np.arange(most)) % len(self._tokens)
        there = np.logical_and.accumulate(self._owners[at] == owners[:, None], axis=1)
        return self._tokens[at], there.sum(axis=1)

    def _slots(self, tokens: IntArray, owners: Ints) -> Ints:
        salts = (owners & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0x85EBCA77)
        return ((_hashes(tokens) ^ salts) * np.uint32(0xC2B2AE3D) >> self._shift).astype(np.int64)


def _hashes(tokens: IntArray) -> IntArray:
    """Hashes [L, N] of the n-grams of each level whose last tokens are ``tokens[0]``, those before them [1], [2] ..."""
    sums = np.cumsum(tokens.astype(np.uint32) * _MULTIPLIERS, axis=0, dtype=np.uint32)[LENGTHS - 1]
    sums ^= sums >> np.uint32(15)
    sums *= np.uint32(0x2C1B3C6D)
    return np.asarray(sums)


def _equal(there: IntArray, tail: IntArray) -> Mask:
    """Which n-grams are the tail's [L, N], of candidates [B, L, N] and tails [B, N], last tokens first."""
    return np.asarray(np.logical_and.accumulate(there == tail[:, None], axis=0)[LENGTHS - 1, _LEVELS])


def _longest(equal: Mask) -> Ints:
    """The highest level of each column of [L, N] that is true; the highest of all where none is."""
    return np.asarray(len(LENGTHS) - 1 - equal[::-1].argmax(axis=0))

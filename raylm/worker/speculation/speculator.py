"""Worker: the Speculator family, which guesses the tokens that a step verifies beside the one it computes anyway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from raylm.step_cost import StepCost
from raylm.worker.attention import StepLimits
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.ngram import Floats, Ints, NGramGuesses, NGramIndex
from raylm.worker.step_batch import StepBatch

# A size of step is measured anew after so many others: what was slow once may have been the neighbours.
_LIFETIME = 512
_LONGEST_NAP = 15
# No guess is sure, and below one in fifty none is worth looking at.
_SURE = 0.98
_HOPELESS = 0.02
# Steps without guesses of a size that must have been seen before others are tried.
_STEPS_TO_COMPARE_WITH = 2
# How many times the largest size known the next may be.
_BOLDNESS = 2
# What a step with guesses must promise over one without.
_WORTHWHILE = 1.03


class Speculator(ABC):
    """Adds guesses to the rows of a step; whether they were right is seen by the draw, never trusted.

    A guess counts if it is the token that the sampler draws at its position, from the logits and the random numbers of
    that position. So the tokens are the same with any speculator and with none, greedy and sampled.
    """

    @abstractmethod
    def add(self, row: int) -> None:
        """The row belongs to another sequence from now on."""

    @abstractmethod
    def lay_out(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """The step with guesses, which are written behind the known tokens of ``batch``, and without finished rows."""

    @abstractmethod
    def observe(self, step: StepBatch, seconds: float) -> None:
        """Take note of how long a step took."""


class NoSpeculation(Speculator):
    """No guesses: every step runs as it was planned."""

    def add(self, row: int) -> None:
        """Nothing to know."""

    def lay_out(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """The step itself."""
        return step

    def observe(self, step: StepBatch, seconds: float) -> None:
        """Nothing to learn."""


class NGramSpeculator(Speculator):
    """Guesses that a sequence goes on as it did after the same few tokens earlier on, in prompt or answer.

    Of all guesses of all rows those are made that raise the tokens per second of the step the most, by the chance that
    each holds and by what steps of the one and the other size took. So the number of guesses follows a row's luck, and
    where more tokens cost more than they bring, as in large batches, none are made. While none pay, the rows are looked
    at only now and then.

    Rows whose logits depend on their own tokens (penalties, bad words, min_tokens not reached yet) get no guesses.

    Args:
        limits: of a step, guesses included.
        max_model_len: of a sequence, in tokens.
        most: guesses for a row in a step.
    """

    def __init__(self, limits: StepLimits, max_model_len: int, most: int) -> None:
        self._limits = limits
        self._most = most
        self._guesses = NGramGuesses(NGramIndex(limits.max_num_seqs, max_model_len), limits.max_num_seqs, most)
        self._cost = StepCost(_LIFETIME)
        self._nap = 0
        self._asleep = 0

    def add(self, row: int) -> None:
        """Forget whom the row belonged to, and look at once."""
        self._guesses.forget(row)
        self._nap = self._asleep = 0

    def observe(self, step: StepBatch, seconds: float) -> None:
        """Learn what a step of so many tokens takes."""
        self._cost.observe(int(step.counts.sum()), seconds)

    def lay_out(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """The step with guesses; rows that decode go on where they really are, and leave at their limit."""
        decoding = (step.counts == 1) & (step.draws == 1)
        known = batch.num_tokens[step.rows].astype(np.int64)
        step = replace(step, computed=np.where(decoding, known - 1, step.computed))
        ended = decoding & (known >= batch.limits[step.rows])
        if ended.any():
            step, decoding = step.take(np.flatnonzero(~ended)), decoding[~ended]
        self._asleep -= 1
        if self._asleep >= 0:
            return step
        at = np.flatnonzero(decoding & batch.same_at_all_positions(step.rows))
        if not len(at) or self._cost.times_seen(int(step.counts.sum())) < _STEPS_TO_COMPARE_WITH:
            return step
        return self._with_guesses(step, at, batch)

    def _with_guesses(self, step: StepBatch, at: Ints, batch: InputBatch) -> StepBatch:
        rows = step.rows[at]
        known = batch.num_tokens[rows].astype(np.int64)
        chances = self._guesses.renew(batch.token_ids, rows, known)
        held = batch.num_blocks[rows].astype(np.int64) * self._limits.block_size
        room = np.minimum(np.minimum(batch.limits[rows] - 1, held) - known, self._most)
        counts = self._choose(chances, room, int(step.counts.sum()), int(np.count_nonzero(step.draws)))
        if not counts.any():
            self._nap = self._asleep = min(2 * self._nap + 1, _LONGEST_NAP)
            return step
        self._nap = 0
        owners = np.repeat(rows, counts)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        batch.token_ids[owners, np.repeat(known, counts) + offsets] = self._guesses.tokens[owners, offsets]
        added = np.zeros_like(step.counts)
        added[at] = counts
        grown = replace(step, counts=step.counts + added, draws=step.draws + added)
        return grown.take(np.argsort(grown.counts > 1, kind="stable"))

    def _choose(self, chances: Floats, room: Ints, tokens: int, draws: int) -> Ints:
        """How many guesses each row makes, [R], in a step of so many tokens and draws without them.

        The j-th guess of a row brings a token with the probability ``chance ** j``. Taken in falling order of that,
        each adds a token to the step; the best number of them is where expected draws over predicted time is highest.
        """
        ahead = np.arange(1, self._most + 1)
        gains = np.where(ahead <= room[:, None], np.minimum(chances, _SURE)[:, None] ** ahead, 0.0).ravel()
        unknown = max(_BOLDNESS * self._cost.largest - tokens, _BOLDNESS)
        most = min(int((gains > _HOPELESS).sum()), self._limits.max_num_tokens - tokens, unknown)
        if most <= 0:
            return np.zeros_like(room)
        order = np.argsort(-gains, kind="stable")[:most]
        seconds = np.interp(np.arange(tokens, tokens + most + 1), *self._cost.curve())
        rates = (draws + np.cumsum(gains[order])) / seconds[1:]
        best = int(rates.argmax())
        if rates[best] * seconds[0] < draws * _WORTHWHILE:
            return np.zeros_like(room)
        return np.bincount(order[: best + 1] // self._most, minlength=len(room))


def create_speculator(limits: StepLimits, max_model_len: int, most: int) -> Speculator:
    """The speculator for up to ``most`` guesses for a sequence in a step; 0 is none."""
    return NGramSpeculator(limits, max_model_len, most) if most else NoSpeculation()

"""Draft tokens for the sequences that repeat themselves, as many as make a step pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raylm.step_cost import StepCost
from raylm.worker.arrays import Floats, Ints, ragged
from raylm.worker.attention import StepLimits
from raylm.worker.features import Speculator
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.ngram import NGramDrafts, NGramIndex
from raylm.worker.step_batch import StepBatch

# A size of step is measured anew after so many others: other processes may have slowed down what was slow once.
_LIFETIME = 512
_LONGEST_PAUSE = 15
# No draft is sure, and below one in fifty none is worth a try.
_MOST_CHANCE = 0.98
_LEAST_CHANCE = 0.02
# Steps without drafts of a size that must have been seen before others are tried.
_STEPS_TO_COMPARE_WITH = 2
# How many times the largest size known the next may be.
_GROWTH = 2
# What a step with drafts must promise over one without.
_WORTHWHILE = 1.03


class NGramSpeculator(Speculator):
    """Drafts that a sequence goes on as it did after the same few tokens earlier on, in prompt or answer.

    Of all drafts of all rows those are made that raise the tokens per second of the step the most, by the chance that
    each holds and by what steps of the one and the other size took. So the number of drafts follows a row's success,
    and where more tokens cost more than they bring, as in large batches, none are made. While none pay, the rows are
    looked at only now and then.

    Rows whose logits depend on their own tokens (penalties, bad words, min_tokens not reached yet) get no drafts;
    others up to ``most`` in a step. The ``limits`` of a step include drafts.
    """

    def __init__(self, limits: StepLimits, max_model_len: int, most: int) -> None:
        self._limits = limits
        self._most = most
        self._drafts = NGramDrafts(NGramIndex(limits.max_num_seqs, max_model_len), limits.max_num_seqs, most)
        self._cost = StepCost(_LIFETIME)
        self._pause = 0
        self._steps_to_skip = 0

    def add(self, row: int) -> None:
        self._drafts.forget(row)
        self._pause = self._steps_to_skip = 0

    def observe(self, step: StepBatch, seconds: float) -> None:
        self._cost.observe(int(step.counts.sum()), seconds)

    def propose(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """Rows that decode go on where they really are, and leave at their limit."""
        decoding = (step.counts == 1) & (step.draws == 1)
        known = batch.num_tokens[step.rows].astype(np.int64)
        step = replace(step, computed=np.where(decoding, known - 1, step.computed))
        ended = decoding & (known >= batch.limits[step.rows])
        if ended.any():
            step, decoding = step.take(np.flatnonzero(~ended)), decoding[~ended]
        self._steps_to_skip -= 1
        if self._steps_to_skip >= 0:
            return step
        at = np.flatnonzero(decoding & batch.same_at_all_positions(step.rows))
        if not len(at) or self._cost.times_seen(int(step.counts.sum())) < _STEPS_TO_COMPARE_WITH:
            return step
        return self._with_drafts(step, at, batch)

    def _with_drafts(self, step: StepBatch, at: Ints, batch: InputBatch) -> StepBatch:
        rows = step.rows[at]
        known = batch.num_tokens[rows].astype(np.int64)
        chances = self._drafts.renew(batch.token_ids, rows, known)
        held = batch.num_blocks[rows].astype(np.int64) * self._limits.block_size
        available = np.minimum(np.minimum(batch.limits[rows] - 1, held) - known, self._most)
        counts = self._choose(chances, available, int(step.counts.sum()), int(np.count_nonzero(step.draws)))
        if not counts.any():
            self._pause = self._steps_to_skip = min(2 * self._pause + 1, _LONGEST_PAUSE)
            return step
        self._pause = 0
        places, offsets = ragged(counts)
        batch.token_ids[rows[places], known[places] + offsets] = self._drafts.tokens[rows[places], offsets]
        added = np.zeros_like(step.counts)
        added[at] = counts
        grown = replace(step, counts=step.counts + added, draws=step.draws + added)
        return grown.take(np.argsort(grown.counts > 1, kind="stable"))

    def _choose(self, chances: Floats, available: Ints, tokens: int, draws: int) -> Ints:
        """How many drafts each row makes, [R], in a step of so many tokens and draws without them.

        The j-th draft of a row brings a token with the probability ``chance ** j``. Taken in falling order of that,
        each adds a token to the step; the best number of them is where expected draws over predicted time is highest.
        """
        ahead = np.arange(1, self._most + 1)
        gains = np.where(ahead <= available[:, None], np.minimum(chances, _MOST_CHANCE)[:, None] ** ahead, 0.0).ravel()
        unknown = max(_GROWTH * self._cost.largest - tokens, _GROWTH)
        most = min(int((gains > _LEAST_CHANCE).sum()), self._limits.max_num_tokens - tokens, unknown)
        if most <= 0:
            return np.zeros_like(available)
        order = np.argsort(-gains, kind="stable")[:most]
        seconds = np.interp(np.arange(tokens, tokens + most + 1), *self._cost.curve())
        rates = (draws + np.cumsum(gains[order])) / seconds[1:]
        best = int(rates.argmax())
        if rates[best] * seconds[0] < draws * _WORTHWHILE:
            return np.zeros_like(available)
        return np.bincount(order[: best + 1] // self._most, minlength=len(available))

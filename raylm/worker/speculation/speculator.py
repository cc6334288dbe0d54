"""Draft tokens for the sequences that repeat themselves or answers of before, as many as make a step pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from raylm.messages import NewSequence
from raylm.models import SINGLE_RANK, Ranks
from raylm.step_cost import StepCost
from raylm.worker.arrays import Floats, Ints, ragged
from raylm.worker.attention import StepLimits
from raylm.worker.features import Speculator
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.drafts import Drafts
from raylm.worker.speculation.ngram import AnswerHistory, NGramIndex
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
    """Drafts that a sequence goes on as a text did after the same tokens earlier on.

    That is its own text, prompt or answer, or one of the answers of late, ``shared`` by all tenants or each tenant's
    own; a cache salt parts them too. Where the form of an answer leaves one way to go on, that is drafted.

    Of all drafts of all rows those are made that raise the tokens per second of the step the most, by the chance that
    each holds and by what steps of the one and the other size took. So the number of drafts follows a row's success,
    and where more tokens cost more than they bring, as in large batches, none are made. While none pay, the rows are
    looked at only now and then.

    Rows whose logits depend on their own tokens by other than the form of the answer (penalties, bad words, min_tokens
    not reached yet) get no drafts; others up to ``most`` in a step. The ``limits`` of a step include drafts. Of several
    ranks, rank 0 decides: how long its steps take is known to it alone.
    """

    def __init__(
        self,
        limits: StepLimits,
        max_model_len: int,
        most: int,
        shared: bool = False,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self._limits, self._most, self._shared, self._ranks = limits, most, shared, ranks
        index = NGramIndex(limits.max_num_seqs, max_model_len)
        self._drafts = Drafts(index, AnswerHistory(), limits.max_num_seqs, most)
        self._cost = StepCost(_LIFETIME)
        self._pause = 0
        self._steps_to_skip = 0

    def add(self, row: int, new: NewSequence) -> None:
        tenant, _, salt = new.owner.partition("\0")
        self._drafts.forget(row, hash(salt if self._shared else (tenant, salt)))
        self._pause = self._steps_to_skip = 0

    def remove(self, row: int, batch: InputBatch) -> None:
        known = batch.token_ids[row, : batch.num_tokens[row]]
        if self._ranks.rank == 0:
            self._drafts.keep(row, known, int(batch.num_prompt_tokens[row]))

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
        if not decoding.any():
            return step
        counts = np.zeros_like(step.counts)
        if self._ranks.rank == 0 and self._is_worth_a_look(step):
            counts = self._write(step, np.flatnonzero(decoding & batch.may_be_drawn_ahead(step.rows)), batch)
        counts = self._agree(step, counts, batch)
        if not counts.any():
            return step
        grown = replace(step, counts=step.counts + counts, draws=step.draws + counts)
        return grown.take(np.argsort(grown.counts > 1, kind="stable"))

    def _is_worth_a_look(self, step: StepBatch) -> bool:
        self._steps_to_skip -= 1
        return self._steps_to_skip < 0 and self._cost.times_seen(int(step.counts.sum())) >= _STEPS_TO_COMPARE_WITH

    def _write(self, step: StepBatch, at: Ints, batch: InputBatch) -> Ints:
        """Write drafts behind the known tokens of the sequences ``at`` places of the step; how many each has, [S]."""
        added = np.zeros_like(step.counts)
        if not len(at):
            return added
        rows = step.rows[at]
        known = batch.num_tokens[rows].astype(np.int64)
        self._drafts.renew(batch.token_ids, rows, known)
        self._follow_forms(rows, batch)
        held = batch.num_blocks[rows].astype(np.int64) * self._limits.block_size
        available = np.minimum(np.minimum(batch.limits[rows] - 1, held) - known, self._drafts.counts[rows])
        chances = self._drafts.chances(rows)
        counts = self._choose(chances, available, int(step.counts.sum()), int(np.count_nonzero(step.draws)))
        if not counts.any():
            self._pause = self._steps_to_skip = min(2 * self._pause + 1, _LONGEST_PAUSE)
            return added
        self._pause = 0
        places, offsets = ragged(counts)
        batch.token_ids[rows[places], known[places] + offsets] = self._drafts.tokens[rows[places], offsets]
        added[at] = counts
        return added

    def _follow_forms(self, rows: Ints, batch: InputBatch) -> None:
        """Of rows with a form: what alone it leaves, or as many drafts as fit it."""
        for row in rows[batch.structured.owned(rows)].tolist():
            if forced := batch.structured.forced(row):
                self._drafts.force(row, forced)
            elif count := int(self._drafts.counts[row]):
                drafts = self._drafts.tokens[row, :count].tolist()
                self._drafts.cut(row, batch.structured.num_fitting(row, drafts))

    def _agree(self, step: StepBatch, counts: Ints, batch: InputBatch) -> Ints:
        """The counts [S] of rank 0, whose drafts every rank has then."""
        if self._ranks.world_size == 1:
            return counts
        counts = self._ranks.broadcast(torch.from_numpy(counts)).numpy()
        if counts.any():
            places, offsets = ragged(counts)
            where = step.rows[places], batch.num_tokens[step.rows[places]] + offsets
            drafts = torch.from_numpy(batch.token_ids[where].astype(np.int64))
            batch.token_ids[where] = self._ranks.broadcast(drafts).numpy()
        return counts

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

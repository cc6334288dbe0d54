"""Draft tokens for the sequences that repeat themselves or answers of before, as many as make a step pay."""

from __future__ import annotations

import numpy as np
import torch

from raylm.messages import NewSequence
from raylm.models import SINGLE_RANK, Ranks
from raylm.step_cost import StepCost
from raylm.worker.arrays import ragged
from raylm.worker.attention import StepLimits
from raylm.worker.features import Speculator
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.drafts import Drafts
from raylm.worker.step_batch import StepBatch

# A size of step is measured anew after so many others: other processes may have slowed down what was slow once.
_LIFETIME = 512
_LONGEST_PAUSE = 15
_OBSERVED_IN_PAUSES = 4  # one step in so many, in the longest pauses
# Steps without drafts of a size that must have been seen before others are tried.
_STEPS_TO_COMPARE_WITH = 2
# So many steps after one with drafts what was planned is where the rows really are: at most two are in flight.
_STEPS_TO_SETTLE = 4
# How many times the largest size known the next may be.
_GROWTH = 2


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
        most: int,
        shared: bool = False,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self._limits, self._shared, self._ranks = limits, shared, ranks
        self._drafts = Drafts(limits.max_num_seqs, most, limits.block_size)
        self._cost = StepCost(_LIFETIME)
        self._pause = self._steps_to_skip = self._settled = 0

    def add(self, row: int, new: NewSequence) -> None:
        tenant, _, salt = new.owner.partition("\0")
        self._drafts.forget(row, hash(salt if self._shared else (tenant, salt)))
        self._pause = self._steps_to_skip = 0

    def remove(self, row: int, batch: InputBatch) -> None:
        if self._ranks.rank == 0:
            self._drafts.keep(row, batch)

    def observe(self, step: StepBatch, seconds: float) -> None:
        if self._pause < _LONGEST_PAUSE or not self._steps_to_skip % _OBSERVED_IN_PAUSES:
            self._cost.observe(step.num_tokens, seconds)

    def propose(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """Rows that decode go on where they really are, and leave at their limit."""
        self._settled += 1
        if self._steps_to_skip > 0 and self._settled > _STEPS_TO_SETTLE and self._ranks.world_size == 1:
            self._steps_to_skip -= 1
            return step
        count = self._drafts.begin(step, batch)
        drafted = count > 0 and self._ranks.rank == 0 and self._write(count, batch)
        if self._ranks.world_size > 1 and count:
            drafted = self._agree(count, batch)
        if not drafted:
            return self._drafts.without(step, count)
        self._settled = 0
        return self._drafts.grown(step, count)

    def _write(self, count: int, batch: InputBatch) -> bool:
        """Write drafts behind the known tokens of the step's sequences; whether there are any."""
        self._steps_to_skip -= 1
        tokens = sum(self._drafts.step_counts[:count].tolist())
        if self._steps_to_skip >= 0 or self._cost.times_seen(tokens) < _STEPS_TO_COMPARE_WITH:
            return False
        unknown = max(_GROWTH * self._cost.largest - tokens, _GROWTH)
        most = min(self._limits.max_num_tokens - tokens, unknown)
        if batch.has_followers:
            self._drafts.may[:count] &= batch.may_be_drawn_ahead(self._drafts.rows[:count])
            any_chance = self._drafts.renew(count)
            if batch.structured.states:
                any_chance |= self._follow_forms(count, batch)
            found = any_chance and self._drafts.choose(count, most, self._cost) > 0
        else:
            found = self._drafts.renew_and_choose(count, most, self._cost) > 0
        if found:
            self._pause = 0
            return True
        self._pause = self._steps_to_skip = min(2 * self._pause + 1, _LONGEST_PAUSE)
        return False

    def _follow_forms(self, count: int, batch: InputBatch) -> bool:
        """Of rows with a form: what alone it leaves, or as many drafts as fit it; whether there is such a row."""
        rows = self._drafts.rows[:count][self._drafts.may[:count] > 0]
        owned = rows[batch.structured.owned(rows)].tolist()
        for row in owned:
            if forced := batch.structured.forced(row):
                self._drafts.force(row, forced)
            elif most := int(self._drafts.counts[row]):
                drafts = self._drafts.tokens[row, :most].tolist()
                self._drafts.cut(row, batch.structured.num_fitting(row, drafts))
        return len(owned) > 0

    def _agree(self, count: int, batch: InputBatch) -> bool:
        """Every rank has the drafts of rank 0 then; whether there are any."""
        added = self._drafts.added[:count]
        added[:] = self._ranks.broadcast(torch.from_numpy(added.copy())).numpy()
        if not added.any():
            return False
        places, offsets = ragged(added)
        rows = self._drafts.rows[places]
        where = rows, batch.num_tokens[rows] + offsets
        drafts = torch.from_numpy(batch.token_ids[where].astype(np.int64))
        batch.token_ids[where] = self._ranks.broadcast(drafts).numpy()
        return True

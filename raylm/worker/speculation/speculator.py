"""NGramSpeculator: draft tokens for sequences that repeat their own text or earlier answers."""

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

# The cost of a step size is measured again after this many other steps: another process may have slowed it down.
_LIFETIME = 512
_LONGEST_PAUSE = 15  # most steps without a search for drafts
_OBSERVED_IN_PAUSES = 4  # one step in this many is measured during the longest pauses
# Measured steps without drafts of a size that are needed before drafts are tried.
_STEPS_TO_COMPARE_WITH = 2
# This many steps after a step with drafts, the planned positions are the real ones: at most two steps are in flight.
_STEPS_TO_SETTLE = 4
# A step may have at most this many times the tokens of the largest measured step.
_GROWTH = 2


class NGramSpeculator(Speculator):
    """Drafts that a sequence continues as an earlier text continued after the same tokens.

    The earlier text is the sequence's own prompt or answer, or a recent answer: of any tenant if ``shared``, else of
    the same tenant. Requests with different cache salts never use each other's answers. If the form of an answer allows
    only one continuation, that continuation is drafted.

    Drafts are selected over all rows to raise the tokens per second of the step most, from the chance of each draft and
    the measured time of steps of both sizes. So the number of drafts follows the success of a row, and no drafts are
    made where additional tokens cost more than they gain, as in large batches. While none pay, the search for drafts
    pauses, for at most 15 steps.

    Rows whose logits depend on their own tokens in another way than by the form of the answer (penalties, bad words,
    min_tokens not reached yet) get no drafts. Other rows get at most ``most`` in a step. The ``limits`` of a step
    include drafts. With several ranks, rank 0 decides, because only it knows how long its steps take.
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
        """Add drafts to a step. Decoding rows continue at their real position; rows at their limit leave the step."""
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
        """Write drafts after the known tokens of the step's sequences. Returns whether there are any."""
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
        """For rows with a grammar, draft the only possible continuation, or keep the drafts that the grammar allows.

        Returns whether there is such a row.
        """
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
        """Copy the drafts of rank 0 to all ranks. Returns whether there are any."""
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

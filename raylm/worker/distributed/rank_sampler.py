"""Worker: the Samplers of ranks that share a model: rank 0 draws, and the others take over what it drew.

Every rank could draw for itself, from the same logits by the same random numbers. But then the smallest difference, in
a kernel, a mask or a clock, would let ranks go on with different tokens, and nobody would see it. So there is one draw.
"""

from __future__ import annotations

import torch

from raylm.messages import Logprobs
from raylm.models import Ranks
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import IntArray, Sampler, SamplerOutput


class _RankSampler(Sampler):
    """A Sampler that is one of several."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks


class LeadingSampler(_RankSampler):
    """Rank 0's: draws, and tells."""

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        """As a Sampler alone; the drawn tokens go to all ranks."""
        drawn = super().sample(logits, rows, batch, offsets)
        self._ranks.broadcast(torch.from_numpy(drawn.token_ids))
        return drawn


class FollowingSampler(_RankSampler):
    """Another rank's: has no logits of its own, and hears what was drawn."""

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        """What rank 0 drew; which rows failed, and log-probabilities, it tells by itself."""
        heard = torch.empty(len(rows), dtype=torch.int64)
        return SamplerOutput(self._ranks.broadcast(heard).numpy())

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: IntArray, top: int) -> Logprobs:
        """Nothing: rank 0 tells them."""
        return Logprobs([], [], [], [])


def select_sampler(ranks: Ranks) -> Sampler:
    """The sampler of one of the ``ranks``."""
    if ranks.world_size == 1:
        return Sampler()
    return FollowingSampler(ranks) if ranks.rank else LeadingSampler(ranks)

"""Sampling on ranks that share a model: rank 0 draws, and the others take over what it drew.

Every rank could draw for itself, from the same logits by the same random numbers. But then the smallest difference, in
a kernel, a mask or a clock, would let ranks go on with different tokens unnoticed. So there is one draw.
"""

from __future__ import annotations

import torch

from raylm.messages import Logprobs
from raylm.models import Ranks
from raylm.worker.arrays import IntArray
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import Sampler, SamplerOutput


class RankSampler(Sampler):
    """The Sampler of one rank: only rank 0 has logits, draws, and reports failed rows and log-probabilities."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        if self._ranks.rank:
            return SamplerOutput(self._ranks.broadcast(torch.empty(len(rows), dtype=torch.int64)).numpy())
        drawn = super().sample(logits, rows, batch, offsets)
        self._ranks.broadcast(torch.from_numpy(drawn.token_ids))
        return drawn

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: IntArray, top: int) -> Logprobs:
        return Logprobs([], [], [], []) if self._ranks.rank else super().prompt_logprobs(logits, token_ids, top)

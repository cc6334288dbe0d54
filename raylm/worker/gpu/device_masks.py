"""Masks of structured outputs, copied to the device and applied there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raylm.worker.input_buffers import Column
from raylm.worker.sampling.structured_outputs import Restriction

_ANY = -1


class DeviceMasks:
    """Pinned memory for the masks of one step, one bit for each token."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._masks = Column((max_num_seqs, -(-vocab_size // 32)), torch.int32, device)
        self._about = Column((2, max_num_seqs), torch.int64, device)
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, logits: Tensor, restrictions: Sequence[Restriction]) -> None:
        """Restrict rows of ``logits`` (rows of the step, vocab_size) to the allowed tokens. Does not wait."""
        count = len(restrictions)
        for at, each in enumerate(restrictions):
            mask = self._masks.host[at]
            mask[:] = -1 if each.mask is None else each.mask
            bits = mask.view(np.uint32)
            np.bitwise_and.at(bits, each.forbidden // 32, ~(np.uint32(1) << (each.forbidden % 32).astype(np.uint32)))
            self._about.host[:, at] = each.position, _ANY if each.only is None else each.only
        masks, (where, only) = self._masks.upload(count), self._about.upload(2)[:, :count]
        spread = (masks.view(torch.uint8)[:, :, None] >> self._bits) & 1
        allowed = spread.flatten(1)[:, : logits.shape[1]].bool()
        mine, only = logits[where], only[:, None]
        # A row with only one allowed token draws it, even if another rule forbids it.
        place = only.clamp(min=0)
        alone = torch.zeros_like(allowed).scatter_(1, place, only >= 0)
        kept = torch.where(allowed & (only < 0), mine, -torch.inf)
        logits[where] = torch.where(alone, 0.0, kept)

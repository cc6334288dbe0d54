"""Worker: the Sampler, which draws one token per row from logits and describes it by log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.messages import Logprobs
from raylm.worker.input_batch import InputBatch

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one call drew, over the rows of the call.

    ``token_ids`` [S] int64 (0 for failed rows); ``logprobs`` over them, None if no row asked; ``failed`` holds
    (position in rows, reason) of rows without a usable distribution.
    """

    token_ids: NDArray[np.int64]
    logprobs: Logprobs | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


class Sampler:
    """Draws tokens in the order of vLLM V1; a row's token depends on its own logits, parameters, seed and position."""

    def sample(self, logits: torch.Tensor, rows: IntArray, batch: InputBatch) -> SamplerOutput:
        """Draw the next token of each row; ``logits`` [S, V] float32 is overwritten. Does not append the tokens."""
        for processor in batch.processors:
            positions = processor.owned(rows)
            if positions.size:
                processor.apply(logits, positions, rows[positions], batch)
        return SamplerOutput(logits.argmax(dim=1).numpy())

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: IntArray, top: int) -> Logprobs:
        """Describe given tokens: ``token_ids`` [T] by ``logits`` [T, V] float32, with the ``top`` most likely ones."""
        raise NotImplementedError

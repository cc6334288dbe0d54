"""Worker: StepLogits, the logits of one step before and after the logits processors, and which rows cannot be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.block_maxima import BlockMaxima

IntArray = NDArray[np.integer[Any]]
Positions = NDArray[np.int64]

NOT_FINITE = "the model's logits are not finite"
OVERFLOW = "the penalties made logits infinite"
NOTHING_LEFT = "allowed_token_ids, bad_words, min_tokens and the form of the answer together leave no token to draw"


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a step, searched once.

    ``processed`` holds a row for each of the step's S rows. ``raw`` holds the untouched rows that log-probabilities
    are asked for, at ``raw_rows`` [S] (other entries mean nothing); it is ``processed`` where nothing was changed.
    ``failed`` gives the reason for each position without a usable distribution.
    """

    processed: BlockMaxima
    raw: BlockMaxima
    raw_rows: Positions
    failed: dict[int, str]


def process_logits(logits: torch.Tensor, rows: IntArray, batch: InputBatch, asking: NDArray[np.bool_]) -> StepLogits:
    """Apply the processors to ``logits`` [S, V] in place; rows ``asking`` [S] for log-probabilities are kept raw."""
    plans = [(processor, processor.owned(rows)) for processor in batch.processors if processor.states]
    plans = [plan for plan in plans if plan[1].size]
    if not plans:
        maxima = BlockMaxima(logits)
        return StepLogits(maxima, maxima, np.arange(len(rows)), _failures(maxima.peak, maxima.peak))
    raw = BlockMaxima(logits[torch.from_numpy(asking).to(logits.device)])
    # Masks could hide what is wrong with the model's own logits.
    peak = logits.amax(dim=1).cpu().numpy()
    for processor, positions in plans:
        processor.apply(logits, positions, rows[positions], batch)
    maxima = BlockMaxima(logits)
    failed = _failures(peak, maxima.peak)
    for position in failed:
        reasons = (processor.reason(int(rows[position])) for processor, _ in plans)
        failed[position] = next((reason for reason in reasons if reason), failed[position])
    return StepLogits(maxima, raw, np.cumsum(asking) - 1, failed)


def _failures(before: NDArray[np.float32], after: NDArray[np.float32]) -> dict[int, str]:
    """The reasons, from each row's largest logit before and after the processors."""
    failed = {}
    for position in np.flatnonzero(~np.isfinite(before) | ~np.isfinite(after)).tolist():
        if not np.isfinite(before[position]):
            failed[position] = NOT_FINITE
        else:
            failed[position] = NOTHING_LEFT if after[position] == -np.inf else OVERFLOW
    return failed

"""Worker: StepLogits, the logits of one step before and after the logits processors, and which rows cannot be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.worker.block_maxima import BlockMaxima
from raylm.worker.input_batch import InputBatch
from raylm.worker.logits_processors import LogitsProcessor

IntArray = NDArray[np.integer[Any]]
Positions = NDArray[np.int64]
Plan = tuple[LogitsProcessor[Any], Positions]

NOT_FINITE = "the model's logits are not finite"
OVERFLOW = "the penalties made logits infinite"
NOTHING_LEFT = "allowed_token_ids, bad_words and min_tokens together leave no token to draw"


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
        failed = dict.fromkeys(_not_finite(maxima.peak).tolist(), NOT_FINITE)
        return StepLogits(maxima, maxima, np.arange(len(rows)), failed)
    raw = BlockMaxima(_select(logits, np.flatnonzero(asking)))
    touched = np.unique(np.concatenate([positions for _, positions in plans]))
    # Masks could hide what is wrong with the model's own logits.
    broken = touched[_not_finite(_select(logits, touched).amax(dim=1))]
    for processor, positions in plans:
        processor.apply(logits, positions, rows[positions], batch)
    maxima = BlockMaxima(logits)
    return StepLogits(maxima, raw, np.cumsum(asking) - 1, _failures(maxima.peak, touched, broken))


def _select(logits: torch.Tensor, positions: Positions) -> torch.Tensor:
    return logits.index_select(0, torch.from_numpy(positions).to(logits.device))


def _not_finite(peak: torch.Tensor) -> Positions:
    return np.flatnonzero(~np.isfinite(peak.cpu().numpy()))


def _failures(peak: torch.Tensor, touched: Positions, broken: Positions) -> dict[int, str]:
    changed = np.setdiff1d(touched, broken)
    failed = dict.fromkeys(broken.tolist(), NOT_FINITE)
    for position in _not_finite(peak).tolist():
        if position not in changed:
            failed[position] = NOT_FINITE
        else:
            failed[position] = NOTHING_LEFT if peak[position] == -torch.inf else OVERFLOW
    return failed

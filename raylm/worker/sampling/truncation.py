"""Truncation: min-p, top-k and top-p over the largest logits of many rows, or over one whole row.

The rules are those of vLLM and transformers, applied in this order:
    min-p keeps tokens at least ``min_p`` times as likely as the most likely one (a ratio, so top-k cannot change it);
    top-k keeps tokens whose logit is at least the k-th largest one, including all tokens equal to the k-th;
    top-p renormalizes the remaining tokens, and keeps the shortest prefix of them in order of (logit descending, token
    id ascending) whose sum reaches ``top_p``, at least one token.
"""

from __future__ import annotations

import numpy as np
import torch

from raylm.worker.arrays import Floats, Floats32, Ints, Mask
from raylm.worker.sampling.block_maxima import BlockMaxima
from raylm.worker.sampling.draw import RandomRows

# Slices of a row's log-probabilities, by which top-p finds its cut without sorting: 64 e-folds in steps of 1/128.
_SLICES_PER_E = 128
_SLICES = 64 * _SLICES_PER_E


def truncate_candidates(maxima: BlockMaxima, rows: RandomRows, width: int) -> tuple[Floats, Ints, Mask]:
    """Truncate rows by their ``width`` largest logits.

    Returns:
        Unnormalized weights [R, width], 0 for dropped tokens; their token ids [R, width]; and whether the result is
        complete [R]. It is incomplete if a token with the last candidate's logit is kept, as more tokens might be.
    """
    values, ids = maxima.top(rows.positions, width)
    weights = rows.weights(values)
    kth = values[np.arange(len(values)), np.minimum(rows.top_k, values.shape[1]) - 1]
    kth = np.where(rows.top_k <= values.shape[1], kth, np.float32(-np.inf))  # where there are fewer, all are kept
    inside = (weights >= rows.min_p[:, None]) & (values >= kth[:, None]) & (weights > 0)
    weights *= inside
    sums = weights.cumsum(axis=1)
    everything = values.shape[1] == maxima.vocab_size
    open_ended = inside[:, -1] & (not everything)
    totals = _totals(maxima, rows, sums, values[:, -1], open_ended) if open_ended.any() else sums[:, -1]
    wanted = np.where(rows.top_p < 1, rows.top_p * totals, np.inf)
    kept = inside.copy()
    kept[:, 1:] &= sums[:, :-1] < wanted[:, None]
    # Top-p cuts through equal logits where the last token it keeps and the first it drops are equal.
    split = (inside[:, 1:] & ~kept[:, 1:] & kept[:, :-1] & (values[:, 1:] == values[:, :-1])).any(axis=1)
    if split.any():
        kept[split] = _settle_equals(values[split], ids[split], inside[split], kept[split])
    weights *= kept
    return weights, ids, ~(kept & (values == values[:, -1:])).any(axis=1) | everything


def _totals(maxima: BlockMaxima, rows: RandomRows, sums: Floats, last: Floats32, open_ended: Mask) -> Floats:
    """The total weight [R] of which top-p takes its share: that of the candidates, or of the row if ``open_ended``.

    If top-p is the only limit, the maxima of the blocks bound the rest of the row. The exact sum over the whole row is
    computed only if the cut is ambiguous within the bounds. With other limits the candidates do not suffice: inf.
    """
    totals = np.where(open_ended, np.inf, sums[:, -1])
    simple = np.flatnonzero(open_ended & (rows.top_k == maxima.vocab_size) & (rows.min_p == 0) & (rows.top_p < 1))
    if not simple.size:
        return totals
    some, sums = rows.take(simple), sums[simple]
    totals[simple] = sums[:, -1] + maxima.tail_bound(*some.softmax, last[simple])
    low, high = some.top_p * sums[:, -1], some.top_p * totals[simple]
    between = (sums[:, :-1] >= low[:, None]) & (sums[:, :-1] < high[:, None])
    unsure = np.flatnonzero(between.any(axis=1))
    if unsure.size:
        totals[simple[unsure]] = maxima.masses(*some.take(unsure).softmax).sum(axis=1)
    return totals


def _settle_equals(values: Floats32, ids: Ints, inside: Mask, kept: Mask) -> Mask:
    """Of equal logits at the cut, keep as many as before, but those with the smallest ids."""
    cut = np.where(kept, values, np.inf).min(axis=1, keepdims=True)
    equal = inside & (values == cut)
    count = (equal & kept).sum(axis=1)
    equal_ids = np.sort(np.where(equal, ids, np.iinfo(np.int64).max), axis=1)
    last = equal_ids[np.arange(len(ids)), count - 1]
    settled: Mask = (kept & ~equal) | (equal & (ids <= last[:, None]))
    return settled


def truncate_row(logits: torch.Tensor, row: RandomRows) -> torch.Tensor:
    """Compute weights [V] float64 (0 for dropped tokens) from logits [V] float32. Takes 1 to 2 ms for 151,936."""
    top_p, top_k = row.top_p.item(), row.top_k.item()
    scaled = logits.double().sub_(row.peak.item()).div_(row.temperature.item())
    weights = scaled.exp()
    weights.mul_(weights >= row.min_p.item())
    if top_k < len(logits):
        weights.mul_(logits >= logits.topk(top_k).values[-1])
    return _keep_nucleus(weights, scaled, top_p) if top_p < 1 else weights


def _keep_nucleus(weights: torch.Tensor, scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Apply top-p without a full sort: sum thin slices of likelihood, then sort only the slice with the cut."""
    slices = scaled.mul(-_SLICES_PER_E).clamp_(max=_SLICES - 1).long()
    masses = torch.bincount(slices, weights, minlength=_SLICES)
    sums = masses.cumsum(0)
    wanted = top_p * sums[-1]
    crossed = (sums < wanted).sum().clamp_(max=_SLICES - 1)
    members = ((slices == crossed) & (weights > 0)).nonzero().squeeze(1)
    # The sort is stable and nonzero() gives ascending ids, so equal logits stay in order of id.
    members = members[scaled[members].sort(descending=True, stable=True).indices]
    before = sums[crossed] - masses[crossed] + weights[members].cumsum(0) - weights[members]
    weights.mul_(slices <= crossed)
    weights[members[before >= wanted]] = 0
    return weights

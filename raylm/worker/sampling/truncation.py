"""Truncation: min-p, top-k and top-p over the largest logits of many rows, or over the whole of one row.

The rules are vLLM's and transformers', min-p first, then top-k, then top-p:
    min-p keeps tokens at least ``min_p`` times as likely as the most likely one (a ratio: top-k cannot change it);
    top-k keeps tokens whose logit is at least the k-th largest one: all equals of the k-th are kept;
    top-p keeps, among what is left and renormalised, the shortest run of tokens in order of (logit falling, token id
    rising) whose sum reaches ``top_p``: each token before which less than ``top_p`` was kept, so at least one.
"""

from __future__ import annotations

import numpy as np
import torch

from raylm.worker.arrays import Floats, Floats32, Ints, Mask
from raylm.worker.sampling.block_maxima import BlockMaxima
from raylm.worker.sampling.draw import RandomRows

# Slices of a row's log-probabilities by which top-p finds its cut without sorting: 64 e-folds in steps of 1/128.
_SLICES_PER_E = 128
_SLICES = 64 * _SLICES_PER_E


def truncate_candidates(maxima: BlockMaxima, rows: RandomRows, width: int) -> tuple[Floats, Ints, Mask]:
    """Truncate rows by looking at their ``width`` largest logits only.

    Returns:
        Weights [R, width], unnormalised, 0 for dropped tokens; their token ids [R, width]; and whether [R] they are the
        whole truth. They are not if a token with the last candidate's logit is kept: others could then be kept too.
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
    """What top-p takes its share of: the candidates' sum, and for ``open_ended`` rows the whole row's; [R].

    Where top-p is the only limit, the maxima of the blocks bound the rest of the row; the sum over the whole row is
    taken only if the cut could fall on different tokens within the bounds. Else the candidates cannot tell: inf.
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
    """Keep as many of the equal logits, but those with the smallest ids."""
    cut = np.where(kept, values, np.inf).min(axis=1, keepdims=True)
    equal = inside & (values == cut)
    count = (equal & kept).sum(axis=1)
    equal_ids = np.sort(np.where(equal, ids, np.iinfo(np.int64).max), axis=1)
    last = equal_ids[np.arange(len(ids)), count - 1]
    settled: Mask = (kept & ~equal) | (equal & (ids <= last[:, None]))
    return settled


def truncate_row(logits: torch.Tensor, row: RandomRows) -> torch.Tensor:
    """Logits [V] float32 -> weights [V] float64, 0 for dropped tokens: the slow way, 1 to 2 ms for 151,936 of them."""
    top_p, top_k = row.top_p.item(), row.top_k.item()
    scaled = logits.double().sub_(row.peak.item()).div_(row.temperature.item())
    weights = scaled.exp()
    weights.mul_(weights >= row.min_p.item())
    if top_k < len(logits):
        weights.mul_(logits >= logits.topk(top_k).values[-1])
    return _keep_nucleus(weights, scaled, top_p) if top_p < 1 else weights


def _keep_nucleus(weights: torch.Tensor, scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Top-p without a sort: sum thin slices of likelihood, then sort only the slice in which the cut falls."""
    slices = scaled.mul(-_SLICES_PER_E).clamp_(max=_SLICES - 1).long()
    masses = torch.bincount(slices, weights, minlength=_SLICES)
    sums = masses.cumsum(0)
    wanted = top_p * sums[-1]
    crossed = (sums < wanted).sum().clamp_(max=_SLICES - 1)
    members = ((slices == crossed) & (weights > 0)).nonzero().squeeze(1)
    # Stable, and nonzero gives rising ids: equals stay in order of id.
    members = members[scaled[members].sort(descending=True, stable=True).indices]
    before = sums[crossed] - masses[crossed] + weights[members].cumsum(0) - weights[members]
    weights.mul_(slices <= crossed)
    weights[members[before >= wanted]] = 0
    return weights

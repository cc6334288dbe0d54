"""Worker: min-p, top-k and top-p over the largest logits of many rows, or over the whole of one row.

The rules are vLLM's and transformers', min-p first, then top-k, then top-p:
    min-p keeps tokens at least ``min_p`` times as likely as the most likely one (a ratio: top-k cannot change it);
    top-k keeps tokens whose logit is at least the k-th largest one: all equals of the k-th are kept;
    top-p keeps, among what is left and renormalised, the shortest run of tokens in order of (logit falling, token id
    rising) whose sum reaches ``top_p``: each token before which less than ``top_p`` was kept, so at least one.
"""

from __future__ import annotations

import torch

from raylm.worker.draw import RandomRows

# Slices of a row's log-probabilities by which top-p finds its cut without sorting: 64 e-folds in steps of 1/128.
_SLICES_PER_E = 128
_SLICES = 64 * _SLICES_PER_E


def truncate_candidates(
    values: torch.Tensor, ids: torch.Tensor, rows: RandomRows, totals: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncate rows of which only the largest logits are at hand.

    Args:
        values: [R, C] float32, the C largest logits of each row in falling order.
        ids: [R, C] int64, their token ids.
        rows: the parameters.
        totals: [R] float64, the sum of exp((logit - peak) / temperature) over the whole row where top-p is the only
            limit; inf where it is not known.
        vocab_size: candidates as many as this are the whole row.

    Returns:
        Weights [R, C] float64, unnormalised, 0 for dropped tokens; and whether [R] they are the whole truth. They are
        not if a token with the last candidate's logit is kept: tokens beyond the candidates could then be kept too.
    """
    whole = values.shape[1] == vocab_size
    weights = ((values.double() - rows.peak[:, None]) / rows.temperature[:, None]).exp_()
    inside = (weights >= rows.min_p[:, None]) & (values >= _kth_largest(values, rows.top_k)) & (weights > 0)
    weights.mul_(inside)
    sums = weights.cumsum(dim=1)
    totals = sums[:, -1] if whole else torch.where(inside[:, -1], totals, sums[:, -1])
    wanted = torch.where(rows.top_p < 1, rows.top_p * totals, torch.inf)
    kept = inside.clone()
    kept[:, 1:] &= sums[:, :-1] < wanted[:, None]
    kept = _settle_equals(values, ids, inside, kept)
    complete = torch.ones_like(kept[:, 0]) if whole else ~(kept & (values == values[:, -1:])).any(dim=1)
    return weights.mul_(kept), complete


def _kth_largest(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest candidate of each row, [R, 1]; -inf where there are fewer."""
    count = values.shape[1]
    kth = values.gather(1, (top_k[:, None] - 1).clamp(max=count - 1))
    return kth.masked_fill_(top_k[:, None] > count, -torch.inf)


def _settle_equals(values: torch.Tensor, ids: torch.Tensor, inside: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Where top-p cuts through equal logits, keep as many of them but those with the smallest ids."""
    cut = values.masked_fill(~kept, torch.inf).amin(dim=1, keepdim=True)
    equal = inside & (values == cut)
    split = (equal & ~kept).any(dim=1)
    if not bool(split.any()):
        return kept
    equal_ids = ids.masked_fill(~equal, torch.iinfo(torch.int64).max).sort(dim=1).values
    count = (equal & kept).sum(dim=1, keepdim=True)
    return kept & ~equal | equal & (ids <= equal_ids.gather(1, count - 1))


def truncate_row(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Truncate one whole row, for any limits: the slow way, 1 to 2 ms for 151,936 tokens.

    ``logits`` is [V] float32 and ``rows`` holds the one row. Gives weights [V] float64, 0 for dropped tokens.
    """
    top_p, min_p, top_k = rows.top_p.item(), rows.min_p.item(), int(rows.top_k.item())
    scaled = logits.double().sub_(rows.peak).div_(rows.temperature)
    weights = scaled.exp()
    weights.mul_(weights >= min_p)
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

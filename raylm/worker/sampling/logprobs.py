"""Log-probabilities of drawn and of given tokens under the raw distribution, as columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raylm.messages import Logprobs
from raylm.params import MAX_LOGPROBS
from raylm.worker.arrays import Floats, Floats32, IntArray, Ints, Mask
from raylm.worker.sampling.block_maxima import BlockMaxima

# More than may be asked for, so that equal logits at the end of the list are nearly always ordered by id; and the
# same for all, so that what one row shows does not depend on what another one asks for.
_WIDTH = MAX_LOGPROBS + 12
# What stands for the logarithm of zero: JSON has no infinity, and OpenAI's interface uses this number.
FLOOR = -9999.0


def describe_tokens(
    maxima: BlockMaxima,
    rows: Ints,
    token_ids: IntArray,
    tops: IntArray,
    wanted: Mask,
    chosen: Mapping[int, Ints] | None = None,
) -> Logprobs:
    """Describe one token of each row, as columns over all of them ([S] each); only those ``wanted`` get entries.

    ``rows`` says where in ``maxima`` a row stands. Entries are the token itself and then the ``tops`` most likely ones
    by (logit falling, id rising), without tokens of probability zero. A rank is 1 + the number of tokens that are more
    likely, so equals share it. ``chosen`` are, by position, tokens that stand in place of the most likely ones, as
    given.
    """
    counts, ranks = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    if not wanted.any():
        return Logprobs(counts.tolist(), [], [], ranks.tolist())
    where, tokens = rows[wanted], token_ids[wanted].astype(np.int64)
    own = maxima.pick(where, tokens)
    values, ids = maxima.top(where, _WIDTH)
    order = np.lexsort((ids, -values), axis=1)
    values, ids = np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)
    ranks[wanted] = _ranks(maxima, where, own, values)
    values, ids = values[:, :MAX_LOGPROBS], ids[:, :MAX_LOGPROBS]
    logits = np.concatenate([own[:, None], values], axis=1).astype(np.float64)
    peak = maxima.peak[where].astype(np.float64)
    sums = np.log(maxima.masses(where, peak, np.ones_like(peak)).sum(axis=1)) + peak
    logprobs = np.maximum(logits - sums[:, None], FLOOR)
    shown = np.arange(logits.shape[1]) <= tops[wanted, None]
    shown[:, 1:] &= values > -np.inf
    counts[wanted] = shown.sum(axis=1)
    entries = np.concatenate([tokens[:, None], ids], axis=1)[shown]
    found = Logprobs(counts.tolist(), entries.tolist(), logprobs[shown].tolist(), ranks.tolist())
    at = {int(position): place for place, position in enumerate(np.flatnonzero(wanted))}
    described = {
        position: (ids, np.maximum(maxima.pick(np.full(len(ids), rows[position]), ids) - sums[at[position]], FLOOR))
        for position, ids in (chosen or {}).items()
        if position in at
    }
    return _with_chosen(found, described) if described else found


def _with_chosen(found: Logprobs, described: Mapping[int, tuple[Ints, Floats]]) -> Logprobs:
    """``found`` with other tokens than the most likely ones at some positions: their ids and log-probabilities."""
    whole, start = Logprobs([], [], [], found.ranks), 0
    for position, count in enumerate(found.counts):
        end, ids, logprobs = start + count, [], []
        if position in described:
            end, (ids, logprobs) = start + 1, (column.tolist() for column in described[position])
        whole.token_ids.extend([*found.token_ids[start:end], *ids])
        whole.logprobs.extend([*found.logprobs[start:end], *logprobs])
        whole.counts.append(end - start + len(ids))
        start += count
    return whole


def _ranks(maxima: BlockMaxima, rows: Ints, own: Floats32, values: Floats32) -> Ints:
    """1 + the number of larger logits; tokens below the listed ones, which are few, count over the whole row."""
    ranks: Ints = 1 + (values > own[:, None]).sum(axis=1)
    beyond = np.flatnonzero(own < values[:, -1])
    if beyond.size:
        ranks[beyond] = 1 + maxima.count_above(rows[beyond], own[beyond])
    return ranks

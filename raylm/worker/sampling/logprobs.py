"""Log-probabilities of drawn and of given tokens under the raw distribution, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raylm.messages import Logprobs
from raylm.params import MAX_LOGPROBS
from raylm.worker.arrays import Floats, Floats32, IntArray, Ints, Mask
from raylm.worker.sampling.block_maxima import BlockMaxima

# More than may be asked for, so that equal logits at the end of the list are nearly always ordered by id; and the
# same for all, so that what one row shows does not depend on what another one asks for.
WIDTH = MAX_LOGPROBS + 12
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
    if not wanted.any():
        return Logprobs([0] * len(rows), [], [], [0] * len(rows))
    where, tokens = rows[wanted], token_ids[wanted].astype(np.int64)
    own = maxima.pick(where, tokens)
    values, ids = maxima.top(where, WIDTH)
    peak = maxima.peak[where].astype(np.float64)
    sums = np.log(maxima.masses(where, peak, np.ones_like(peak)).sum(axis=1)) + peak
    found = FoundLogits(tokens, own, sums, _ranks(maxima, where, own, values), values, ids)
    given = {
        position: (ids, maxima.pick(np.full(len(ids), rows[position]), ids))
        for position, ids in (chosen or {}).items()
        if wanted[position]
    }
    return logprob_columns_of(found, tops, wanted, given)


@dataclass(frozen=True, slots=True)
class FoundLogits:
    """What tells the log-probabilities of W rows: the ``tokens`` drawn [W], their ``own`` logits, and their ``ranks``.

    ``sums`` [W] are the logarithms of the sums of all exponentials; ``values`` and ``ids`` [W, WIDTH] the largest
    logits in falling order, and whose they are.
    """

    tokens: Ints
    own: Floats32
    sums: Floats
    ranks: Ints
    values: Floats32
    ids: Ints


def logprob_columns_of(
    found: FoundLogits, tops: IntArray, wanted: Mask, given: Mapping[int, tuple[Ints, Floats32]]
) -> Logprobs:
    """Columns over all rows [S] of what was ``found`` in those ``wanted``; ``given`` are ids and logits by position."""
    counts, ranks = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
    order = np.lexsort((found.ids, -found.values), axis=1)[:, :MAX_LOGPROBS]
    values, ids = np.take_along_axis(found.values, order, axis=1), np.take_along_axis(found.ids, order, axis=1)
    ranks[wanted] = found.ranks
    logits = np.concatenate([found.own[:, None], values], axis=1).astype(np.float64)
    logprobs = np.maximum(logits - found.sums[:, None], FLOOR)
    shown = np.arange(logits.shape[1]) <= tops[wanted, None]
    shown[:, 1:] &= values > -np.inf
    counts[wanted] = shown.sum(axis=1)
    entries = np.concatenate([found.tokens[:, None], ids], axis=1)[shown]
    columns = Logprobs(counts.tolist(), entries.tolist(), logprobs[shown].tolist(), ranks.tolist())
    at = np.cumsum(wanted) - 1
    described = {
        position: (ids, np.maximum(logits - found.sums[at[position]], FLOOR))
        for position, (ids, logits) in given.items()
    }
    return _with_chosen(columns, described) if described else columns


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

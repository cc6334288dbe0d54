"""Log-probabilities of drawn and given tokens under the raw distribution, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raylm.messages import Logprobs
from raylm.params import MAX_LOGPROBS
from raylm.worker.arrays import Floats, Floats32, IntArray, Ints, Mask
from raylm.worker.sampling.block_maxima import BlockMaxima

# More than can be requested, so that equal logits at the end of the list are nearly always ordered by id. The same for
# all rows, so that a row's result does not depend on other rows' requests.
WIDTH = MAX_LOGPROBS + 12
# The logarithm of zero: JSON has no infinity, and OpenAI's API uses this number.
FLOOR = -9999.0


def describe_tokens(
    maxima: BlockMaxima,
    rows: Ints,
    token_ids: IntArray,
    tops: IntArray,
    wanted: Mask,
    chosen: Mapping[int, Ints] | None = None,
) -> Logprobs:
    """Describe one token of each row, as columns over all rows ([S] each). Only ``wanted`` rows have entries.

    ``rows`` are the indexes of the rows in ``maxima``. Entries are the token itself and then the ``tops`` most likely
    tokens, by descending logit and ascending id, without tokens of probability zero. A rank is 1 + the number of more
    likely tokens, so equal tokens share a rank. ``chosen`` are, by position, tokens that replace the most likely ones.
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
    """The data for log-probabilities of W rows: the drawn ``tokens`` [W], their ``own`` logits, and their ``ranks``.

    ``sums`` [W] are logarithms of the sums of all exponentials. ``values`` and ``ids`` [W, WIDTH] are the largest
    logits in descending order and their tokens.
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
    """Columns over all rows [S] of the ``found`` data of ``wanted`` rows. ``given`` has ids and logits by position."""
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
    """Replace the most likely tokens at some positions by other tokens: their ids and log-probabilities."""
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
    """1 + the number of larger logits. Tokens below the listed ones, which are few, count over the whole row."""
    ranks: Ints = 1 + (values > own[:, None]).sum(axis=1)
    beyond = np.flatnonzero(own < values[:, -1])
    if beyond.size:
        ranks[beyond] = 1 + maxima.count_above(rows[beyond], own[beyond])
    return ranks

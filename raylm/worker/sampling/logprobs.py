"""Worker: log-probabilities of drawn and of given tokens under the raw distribution, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylm.messages import Logprobs
from raylm.params import MAX_LOGPROBS
from raylm.worker.sampling.block_maxima import BlockMaxima, Ids

IntArray = NDArray[np.integer[Any]]

# More than anyone may ask for, so that equal logits at the end of the list are nearly always ordered by id; and the
# same for all, so that what one row shows does not depend on what another one asks for.
_WIDTH = MAX_LOGPROBS + 12
# What stands for the logarithm of zero: JSON has no infinity, and OpenAI's interface uses this number.
FLOOR = -9999.0


def describe_tokens(
    maxima: BlockMaxima, rows: Ids, token_ids: IntArray, tops: IntArray, wanted: NDArray[np.bool_]
) -> Logprobs:
    """Describe one token of each row, as columns over all of them ([S] each); only those ``wanted`` get entries.

    ``rows`` says where in ``maxima`` a row stands. Entries are the token itself and then the ``tops`` most likely ones
    by (logit falling, id rising), without tokens of probability zero. A rank is 1 + the number of tokens that are more
    likely, so equals share it.
    """
    counts, ranks = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    where, tokens = rows[wanted], token_ids[wanted].astype(np.int64)
    own = maxima.pick(where, tokens)
    values, ids = _ordered(*maxima.top(where, _WIDTH))
    ranks[wanted] = _ranks(maxima, where, own, values)
    values, ids = values[:, :MAX_LOGPROBS], ids[:, :MAX_LOGPROBS]
    logits = np.concatenate([own[:, None], values], axis=1).astype(np.float64)
    logprobs = np.maximum(logits - _log_sum_exp(maxima, where)[:, None], FLOOR)
    shown = np.arange(logits.shape[1]) <= tops[wanted, None]
    shown[:, 1:] &= values > -np.inf
    counts[wanted] = shown.sum(axis=1)
    entries = np.concatenate([tokens[:, None], ids], axis=1)[shown]
    return Logprobs(counts.tolist(), entries.tolist(), logprobs[shown].tolist(), ranks.tolist())


def _ordered(values: NDArray[np.float32], ids: Ids) -> tuple[NDArray[np.float32], Ids]:
    """The same, by (value falling, id rising)."""
    order = np.lexsort((ids, -values), axis=1)
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)


def _log_sum_exp(maxima: BlockMaxima, rows: Ids) -> NDArray[np.float64]:
    peak = maxima.peak[rows].astype(np.float64)
    sums: NDArray[np.float64] = np.log(maxima.masses(rows, peak, np.ones_like(peak)).sum(axis=1))
    return sums + peak


def _ranks(maxima: BlockMaxima, rows: Ids, own: NDArray[np.float32], values: NDArray[np.float32]) -> Ids:
    """1 + the number of larger logits; tokens below the listed ones, which are few, count over the whole row."""
    ranks: Ids = 1 + (values > own[:, None]).sum(axis=1)
    beyond = np.flatnonzero(own < values[:, -1])
    if beyond.size:
        ranks[beyond] = 1 + maxima.count_above(rows[beyond], own[beyond])
    return ranks

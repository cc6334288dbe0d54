"""Worker: log-probabilities of drawn and of given tokens under the raw distribution, as columns."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.messages import Logprobs
from raylm.params import MAX_LOGPROBS
from raylm.worker.block_maxima import BlockMaxima

IntArray = NDArray[np.integer[Any]]

# More than anyone may ask for, so that equal logits at the end of the list are nearly always ordered by id; and the
# same for all, so that what one row shows does not depend on what another one asks for.
_WIDTH = MAX_LOGPROBS + 12
# What stands for the logarithm of zero: JSON has no infinity, and OpenAI's interface uses this number.
FLOOR = -9999.0


def describe_tokens(
    maxima: BlockMaxima, rows: IntArray, token_ids: IntArray, tops: IntArray, wanted: NDArray[np.bool_]
) -> Logprobs:
    """Describe one token of each row, as columns over all of them ([S] each); only those ``wanted`` get entries.

    ``rows`` says where in ``maxima`` a row stands. Entries are the token itself and then the ``tops`` most likely ones
    by (logit falling, id rising), without tokens of probability zero. A rank is 1 + the number of tokens that are more
    likely, so equals share it.
    """
    counts, ranks = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    where = torch.from_numpy(rows[wanted]).to(maxima.logits.device)
    tokens = torch.from_numpy(token_ids[wanted].astype(np.int64)).to(where.device)
    own = maxima.logits[where, tokens]
    values, ids = _ordered(*maxima.top(where, _WIDTH))
    ranks[wanted] = _ranks(maxima, where, own, values).cpu().numpy()
    values, ids = values[:, :MAX_LOGPROBS], ids[:, :MAX_LOGPROBS]
    logits = torch.cat([own[:, None], values], dim=1).double()
    logprobs = (logits - _log_sum_exp(maxima, where)[:, None]).clamp_(min=FLOOR).cpu().numpy()
    shown = np.arange(logits.shape[1]) <= tops[wanted, None]
    shown[:, 1:] &= (values > -torch.inf).cpu().numpy()
    counts[wanted] = shown.sum(axis=1)
    entries = torch.cat([tokens[:, None], ids], dim=1).cpu().numpy()[shown]
    return Logprobs(counts.tolist(), entries.tolist(), logprobs[shown].tolist(), ranks.tolist())


def join(parts: list[Logprobs]) -> Logprobs:
    """The columns of all parts, one after the other."""
    columns = zip(*((part.counts, part.token_ids, part.logprobs, part.ranks) for part in parts), strict=True)
    return Logprobs(*(list(chain.from_iterable(column)) for column in columns)) if parts else Logprobs([], [], [], [])


def _ordered(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by (value falling, id rising)."""
    ids, order = ids.sort(dim=1)
    values, falling = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, falling)


def _log_sum_exp(maxima: BlockMaxima, positions: torch.Tensor) -> torch.Tensor:
    peak = maxima.peak[positions].double()
    return maxima.masses(positions, peak, torch.ones_like(peak)).sum(dim=1).log_().add_(peak)


def _ranks(maxima: BlockMaxima, positions: torch.Tensor, own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """1 + the number of larger logits; tokens below the listed ones, which are few, count over the whole row."""
    ranks = (values > own[:, None]).sum(dim=1)
    beyond = (own < values[:, -1]).nonzero().squeeze(1)
    if len(beyond):
        ranks[beyond] = maxima.count_above(positions[beyond], own[beyond])
    return ranks.add_(1)

"""Worker: the Sampler, which draws one token per row from logits and describes it by log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm import logprob_columns
from raylm.messages import Logprobs
from raylm.worker.input_batch import NO_LOGPROBS, InputBatch
from raylm.worker.sampling.block_maxima import BlockMaxima
from raylm.worker.sampling.draw import RandomRows, draw_from_candidates, draw_from_rows, draw_from_weights
from raylm.worker.sampling.logprobs import describe_tokens
from raylm.worker.sampling.step_logits import process_logits
from raylm.worker.sampling.truncation import truncate_candidates, truncate_row

IntArray = NDArray[np.integer[Any]]
Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]

_PROMPT_ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one call drew, over the rows of the call.

    ``token_ids`` [S] int64 (0 for failed rows); ``logprobs`` over them, None if no row asked (no entries for failed
    rows); ``failed`` holds (position in rows, reason) of rows without a usable distribution.
    """

    token_ids: Positions
    logprobs: Logprobs | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


class Sampler:
    """Draws tokens; a row's token depends on its own logits, parameters, seed and position alone.

    The order is vLLM V1's: log-probabilities of the raw logits; allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties; then argmax (the smallest id among equals) for greedy rows, and for the others temperature, min-p,
    top-k, top-p and the draw. Each row pays for what it asks: truncated rows are drawn from their largest logits, 32
    at first, then 64, then 256 if those do not settle it, and only then from the whole row. A raw logit of -inf is a
    token that cannot be drawn; NaN, +inf, or -inf everywhere fail the row.

    Args:
        widths: how many of the largest logits to try, in rising order; () always takes the whole row.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 64, 256)) -> None:
        self._widths = widths

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        """Draw the next token of each row; it is not appended to the batch.

        ``logits`` is [S, V], cast to float32 if it is not; the processors overwrite it. ``rows`` [S] are distinct, or
        ``offsets`` [S] say how many tokens behind its next one a row draws; then no processor may look at its tokens.

        Raises:
            ValueError: the logits have another shape than rows and vocabulary.
        """
        if logits.shape != (len(rows), batch.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(rows), batch.vocab_size)}")
        if not len(rows):
            return SamplerOutput(np.zeros(0, np.int64))
        sampling = batch.sampling[rows]
        asking = sampling["logprobs"] != NO_LOGPROBS
        step = process_logits(logits.float().contiguous(), rows, batch, asking)
        usable = np.ones(len(rows), np.bool_)
        usable[list(step.failed)] = False
        lengths = batch.num_tokens[rows] if offsets is None else batch.num_tokens[rows] + offsets
        token_ids = self._draw(step.processed, usable, sampling, lengths)
        logprobs = None
        if asking.any():
            logprobs = describe_tokens(step.raw, step.raw_rows, token_ids, sampling["logprobs"], asking & usable)
        return SamplerOutput(token_ids, logprobs, sorted(step.failed.items()))

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: IntArray, top: int) -> Logprobs:
        """Describe given tokens: ``token_ids`` [T] by ``logits`` [T, V] float32, with the ``top`` most likely ones.

        A token whose logits are not finite gets no entries.
        """
        parts = []
        for start in range(0, len(token_ids), _PROMPT_ROWS_AT_ONCE):
            some = slice(start, start + _PROMPT_ROWS_AT_ONCE)
            maxima = BlockMaxima(logits[some].float().contiguous())
            usable = np.isfinite(maxima.peak)
            rows = np.arange(len(usable))
            parts.append(describe_tokens(maxima, rows, token_ids[some], np.full(len(rows), top), usable))
        return logprob_columns.join(parts)

    def _draw(self, maxima: BlockMaxima, usable: Mask, sampling: NDArray[np.void], num_tokens: IntArray) -> Positions:
        """Give each usable row a token by the way that its parameters need; others get 0."""
        token_ids = np.zeros(len(usable), np.int64)
        greedy = sampling["temperature"] == 0
        limited = (sampling["top_k"] < maxima.vocab_size) | (sampling["top_p"] < 1) | (sampling["min_p"] > 0)
        if (at := np.flatnonzero(usable & greedy)).size:
            token_ids[at] = maxima.argmax(at)
        if (at := np.flatnonzero(usable & ~greedy & limited)).size:
            chosen = RandomRows.gather(at, sampling, num_tokens, maxima.peak)
            token_ids[at] = _draw_limited(maxima, chosen, self._widths)
        if (at := np.flatnonzero(usable & ~greedy & ~limited)).size:
            chosen = RandomRows.gather(at, sampling, num_tokens, maxima.peak)
            token_ids[at] = draw_from_rows(maxima, chosen)
        return token_ids


def _draw_limited(maxima: BlockMaxima, rows: RandomRows, widths: tuple[int, ...]) -> Positions:
    """Draw truncated rows from as few of their largest logits as settle it."""
    token_ids = np.zeros(len(rows), np.int64)
    left = np.full(len(rows), True)
    for width in widths:
        trying = np.flatnonzero(left & _may_settle(rows, maxima.vocab_size, width, first=width == widths[0]))
        if trying.size:
            some = rows.take(trying)
            weights, ids, complete = truncate_candidates(maxima, some, width)
            # What is not complete is drawn again below.
            token_ids[trying] = draw_from_candidates(weights, ids, some, maxima.vocab_size)
            left[trying] = ~complete
    for i in np.flatnonzero(left).tolist():
        row = rows.take(np.array([i]))
        token_ids[i] = draw_from_weights(truncate_row(maxima.logits[int(row.positions[0])], row), row)[0]
    return token_ids


def _may_settle(rows: RandomRows, vocab_size: int, width: int, first: bool) -> Mask:
    """Whether it is worth trying [R]: top-p alone needs a bound on all other tokens, loose where candidates are few."""
    worth: Mask = (rows.top_k < width) | ((rows.top_k == vocab_size) & ((rows.min_p > 0) | (not first)))
    return worth

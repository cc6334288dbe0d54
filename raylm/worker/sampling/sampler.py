"""Sampler: draws one token for each row from logits, and computes log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.messages import Logprobs
from raylm.models import SINGLE_RANK, Ranks
from raylm.worker.arrays import Floats32, IntArray, Ints, Mask
from raylm.worker.input_batch import NO_LOGPROBS, InputBatch
from raylm.worker.sampling.block_maxima import BlockMaxima
from raylm.worker.sampling.draw import RandomRows, draw_from_candidates, draw_from_rows, draw_from_weights
from raylm.worker.sampling.logprobs import describe_tokens
from raylm.worker.sampling.truncation import truncate_candidates, truncate_row

NOT_FINITE = "the model's logits are not finite"
OVERFLOW = "the penalties made logits infinite"
MostLikely = Callable[[torch.Tensor], tuple[Floats32, Ints]]
LATE = -1  # token of a row that skips the step
NOTHING_LEFT = "allowed_token_ids, bad_words, min_tokens and the form of the answer together leave no token to draw"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """``token_ids`` [S] int64 (0 for failed rows, LATE for late rows), and ``logprobs``, None if not requested.

    ``failed`` has (position in rows, reason) of rows without a usable distribution. Failed and late rows have no
    logprobs.
    """

    token_ids: Ints
    logprobs: Logprobs | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


class Sampler:
    """Draws tokens. A row's token depends only on its own logits, parameters, seed and position.

    The order is vLLM V1's: log-probabilities of the raw logits; allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties; then argmax (the smallest id among equals) for greedy rows, and for other rows temperature, min-p, top-k,
    top-p and the draw. The cost depends on each row's parameters: truncated rows are drawn from their 32 largest
    logits, then 64, then 256 if these are not enough, and only then from the whole row. A raw logit of -inf is a token
    that cannot be drawn. NaN, +inf, or -inf for all tokens fail the row.

    With several ranks, only rank 0 has logits, draws, and reports failed rows and log-probabilities; other ranks
    receive its tokens. If each rank drew for itself, a small difference in a kernel, a mask or a clock could make ranks
    continue with different tokens unnoticed.

    Args:
        widths: the numbers of largest logits to try, ascending; () always uses the whole row.
        most_likely: finds each row's largest logit and its smallest id, [S] both, for steps that need nothing else.
    """

    def __init__(
        self, widths: tuple[int, ...] = (32, 64, 256), ranks: Ranks = SINGLE_RANK, most_likely: MostLikely | None = None
    ) -> None:
        self._widths, self._ranks, self._most_likely = widths, ranks, most_likely

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        """Draw the next token of each row. Does not append it to the batch.

        ``logits`` [S, V] are cast to float32, and the processors overwrite them. ``rows`` [S] are distinct, or
        ``offsets`` [S] are the number of tokens between a row's last token and the drawn one; then no processor may
        read its tokens.
        """
        if not len(rows):
            return SamplerOutput(np.zeros(0, np.int64))
        if self._ranks.rank:
            return SamplerOutput(self._ranks.broadcast(torch.empty(len(rows), dtype=torch.int64)).numpy())
        if logits.shape != (len(rows), batch.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(rows), batch.vocab_size)}")
        sampling = batch.sampling[rows]
        asking = sampling["logprobs"] != NO_LOGPROBS
        changed = any(processor.states for processor in batch.processors)
        if self._most_likely is not None and not (changed or asking.any() or sampling["temperature"].any()):
            return self._greedy(*self._most_likely(logits.float()))
        step = process_logits(logits.float().contiguous(), rows, batch, asking)
        usable = np.ones(len(rows), np.bool_)
        usable[[*step.failed, *step.late]] = False
        lengths = batch.num_tokens[rows] if offsets is None else batch.num_tokens[rows] + offsets
        token_ids = self._draw(step.processed, usable, sampling, lengths)
        token_ids[step.late] = LATE
        self._ranks.broadcast(torch.from_numpy(token_ids))
        logprobs = None
        if asking.any():
            chosen = {}
            if given := batch.logprob_token_ids:
                chosen = {at: given[row] for at, row in enumerate(rows.tolist()) if row in given}
            tops, wanted = sampling["logprobs"], asking & usable
            logprobs = describe_tokens(step.raw, step.raw_rows, token_ids, tops, wanted, chosen)
        return SamplerOutput(token_ids, logprobs, sorted(step.failed.items()))

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: IntArray, top: int) -> Logprobs:
        """Describe ``token_ids`` [T] by ``logits`` [T, V], with the ``top`` most likely.

        Rows that are not finite are empty.
        """
        if self._ranks.rank or not len(token_ids):
            return Logprobs([], [], [], [])
        maxima = BlockMaxima(logits.float().contiguous())
        rows = np.arange(len(token_ids))
        return describe_tokens(maxima, rows, token_ids, np.full(len(rows), top), np.isfinite(maxima.peak))

    def _greedy(self, peak: Floats32, token_ids: Ints) -> SamplerOutput:
        failed = {} if np.isfinite(peak).all() else failures(peak, peak)
        token_ids[list(failed)] = 0
        if self._ranks.world_size > 1:
            self._ranks.broadcast(torch.from_numpy(token_ids))
        return SamplerOutput(token_ids, failed=sorted(failed.items()))

    def _draw(self, maxima: BlockMaxima, usable: Mask, sampling: NDArray[np.void], num_tokens: IntArray) -> Ints:
        """Draw a token for each usable row by the method that its parameters need; other rows get 0."""
        token_ids = np.zeros(len(usable), np.int64)
        greedy = sampling["temperature"] == 0
        limited = (sampling["top_k"] < maxima.vocab_size) | (sampling["top_p"] < 1) | (sampling["min_p"] > 0)
        if (at := np.flatnonzero(usable & greedy)).size:
            token_ids[at] = maxima.argmax(at)
        for chosen, draw in (limited, self._draw_limited), (~limited, draw_from_rows):
            if (at := np.flatnonzero(usable & ~greedy & chosen)).size:
                token_ids[at] = draw(maxima, RandomRows.gather(at, sampling, num_tokens, maxima.peak))
        return token_ids

    def _draw_limited(self, maxima: BlockMaxima, rows: RandomRows) -> Ints:
        """Draw truncated rows from as few of their largest logits as possible."""
        token_ids = np.zeros(len(rows.positions), np.int64)
        left = np.full(len(rows.positions), True)
        for width in self._widths:
            # Top-p alone needs a bound on all other tokens, which is loose for few candidates.
            bounded = (rows.min_p > 0) | (width > self._widths[0])
            trying = np.flatnonzero(left & ((rows.top_k < width) | (rows.top_k == maxima.vocab_size) & bounded))
            if trying.size:
                some = rows.take(trying)
                weights, ids, complete = truncate_candidates(maxima, some, width)
                # Incomplete rows are drawn again below.
                token_ids[trying] = draw_from_candidates(weights, ids, some, maxima.vocab_size)
                left[trying] = ~complete
        for i in np.flatnonzero(left).tolist():
            row = rows.take(np.array([i]))
            token_ids[i] = draw_from_weights(truncate_row(maxima.logits[int(row.positions[0])], row), row)[0]
        return token_ids


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a step, searched once.

    ``processed`` has a row for each of the step's S rows. ``raw`` has the unchanged rows that request
    log-probabilities, at the indexes ``raw_rows`` [S] (other entries have no meaning); it is ``processed`` if nothing
    was changed. ``failed`` maps positions without a usable distribution to the reason. ``late`` are positions that skip
    the step.
    """

    processed: BlockMaxima
    raw: BlockMaxima
    raw_rows: Ints
    failed: dict[int, str]
    late: list[int] = field(default_factory=list)


def process_logits(logits: torch.Tensor, rows: IntArray, batch: InputBatch, asking: Mask) -> StepLogits:
    """Apply the processors to ``logits`` [S, V] in place. Rows ``asking`` [S] for log-probabilities are kept raw."""
    plans = [(processor, processor.owned(rows)) for processor in batch.processors if processor.states]
    plans = [plan for plan in plans if plan[1].size]
    if not plans:
        maxima = BlockMaxima(logits)
        return StepLogits(maxima, maxima, np.arange(len(rows)), failures(maxima.peak, maxima.peak))
    raw = BlockMaxima(logits[torch.from_numpy(asking).to(logits.device)])
    # Processors could hide faults of the model's logits.
    peak = logits.amax(dim=1).cpu().numpy()
    for processor, positions in plans:
        processor.apply(logits, positions, rows[positions], batch)
    maxima = BlockMaxima(logits)
    late = [position for processor, _ in plans for position in processor.late]
    failed = failures(peak, maxima.peak)
    for position in late:
        failed.pop(position, None)  # it is checked again when the row draws
    for position in failed:
        reasons = (processor.reason(int(rows[position])) for processor, _ in plans)
        failed[position] = next((reason for reason in reasons if reason), failed[position])
    return StepLogits(maxima, raw, np.cumsum(asking) - 1, failed, late)


def failures(before: Floats32, after: Floats32) -> dict[int, str]:
    """The reasons why rows failed, from each row's largest logit before and after the processors."""
    sound = np.isfinite(before)
    failed = np.flatnonzero(~sound | ~np.isfinite(after)).tolist()
    return {at: (NOTHING_LEFT if after[at] == -np.inf else OVERFLOW) if sound[at] else NOT_FINITE for at in failed}

"""BlockMaxima: logits with the maximum of each block, to find the largest logits quickly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from raylm.worker.arrays import Floats, Floats32, Ints, slices

BLOCK = 128
_ROWS_AT_ONCE = 8
_WINDOWS_AT_ONCE = 1024


class BlockMaxima:
    """Logits with the maximum of each block of 128 tokens. Arg-maxima and the k largest are searched in few blocks.

    The k largest logits lie in the k blocks of the largest maxima. Over 32 rows of 151,936 tokens on a CPU the pass
    takes 0.2 ms, and with it argmax takes 0.2 ms (torch alone 2.0) and the largest 64 take 1.0 ms (torch alone 3.2).

    ``logits`` [S, V] float32 are contiguous. ``blocks`` [S, V / 128 rounded up, 128] are the same values; if 128 does
    not divide V, they are a copy padded with -inf. ``peak`` [S] is each row's maximum on the host, NaN if the row has
    one.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.vocab_size = logits, logits.shape[1]
        missing = -logits.shape[1] % BLOCK
        filled = functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        self.blocks = filled.view(len(logits), filled.shape[1] // BLOCK, BLOCK)
        self.maxima = self.blocks.amax(dim=2)
        self.peak: Floats32 = self.maxima.amax(dim=1).cpu().numpy()

    def argmax(self, positions: Ints) -> Ints:
        """The most likely token of each row at ``positions`` [R]; of equals the smallest id."""
        where = self._on_device(positions)
        block = self.maxima[where].argmax(dim=1)
        return (block * BLOCK + self.blocks[where, block].argmax(dim=1)).cpu().numpy()

    def top(self, positions: Ints, k: int) -> tuple[Floats32, Ints]:
        """The k largest logits and their ids, [R, k] both, in descending order. k is at most the vocabulary size.

        The order of equal logits is undefined, and so is which of the logits equal to the last one are included.
        Entries of -inf may repeat an id.
        """
        where = self._on_device(positions)
        blocks = self.maxima[where].topk(min(k, self.maxima.shape[1]), sorted=False).indices
        values, at = self.blocks[where[:, None], blocks].flatten(1).topk(min(k, self.vocab_size))
        ids = blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK
        return values.cpu().numpy(), ids.clamp_(max=self.vocab_size - 1).cpu().numpy()

    def pick(self, positions: Ints, token_ids: Ints) -> Floats32:
        """The logit of one token of each row, [R]."""
        return self.logits[self._on_device(positions), self._on_device(token_ids)].cpu().numpy()

    def highest(self, positions: Ints) -> Floats32:
        """The maxima of the rows, [R, blocks]."""
        return self.maxima[self._on_device(positions)].cpu().numpy()

    def window(self, positions: Ints, first: Ints, count: int) -> torch.Tensor:
        """``count`` blocks of each row, from block ``first`` [R] on: [R, count, 128], -inf beyond the vocabulary."""
        where, block = self._on_device(positions)[:, None], self._on_device(first[:, None] + np.arange(count))
        there = block < self.blocks.shape[1]
        return self.blocks[where, block * there].masked_fill_(~there[:, :, None], -torch.inf)

    def masses(self, positions: Ints, peak: Floats, temperature: Floats) -> Floats:
        """Each block's sum of exp((logit - peak) / temperature), [R, blocks], of float32 terms.

        Computed a few rows at a time, so that intermediate values stay in the cache.
        """
        where, shift, slope = self._on_device(positions), *self._shift_and_slope(peak, temperature)
        pieces = slices(len(positions), _ROWS_AT_ONCE)
        return np.concatenate([_sum_exp(self.blocks.index_select(0, where[s]), shift[s], slope[s]) for s in pieces])

    def window_masses(self, positions: Ints, peak: Floats, temperature: Floats, first: Ints, count: int) -> Floats:
        """Like ``masses``, for ``count`` blocks from block ``first`` [R], [R, count]. Positions may repeat."""
        shift, slope = self._shift_and_slope(peak, temperature)
        pieces = slices(len(positions), _WINDOWS_AT_ONCE)
        return np.concatenate(
            [_sum_exp(self.window(positions[s], first[s], count), shift[s], slope[s]) for s in pieces]
        )

    def tail_bound(self, positions: Ints, peak: Floats, temperature: Floats, last: Floats32) -> Floats:
        """An upper bound [R] of the mass of the logits that are not candidates. None of them exceeds ``last`` [R]."""
        capped = np.minimum(self.highest(positions), last[:, None])
        bound: Floats = np.exp((capped - peak[:, None]) / temperature[:, None]).sum(axis=1) * BLOCK
        return bound

    def count_above(self, positions: Ints, values: Floats32) -> Ints:
        """How many logits of each row exceed ``values`` [R], [R]."""
        where, limits = self._on_device(positions), self._on_device(values)[:, None]
        pieces = slices(len(positions), _ROWS_AT_ONCE)
        above = (self.logits.index_select(0, where[s]) > limits[s] for s in pieces)
        # Sum as bytes: torch sums booleans eight times slower.
        sums = [part.view(torch.int8).sum(dim=1, dtype=torch.int32) for part in above]
        return torch.cat(sums).cpu().numpy().astype(np.int64)

    def _on_device(self, column: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(column).to(self.logits.device)

    def _shift_and_slope(self, peak: Floats, temperature: Floats) -> tuple[torch.Tensor, torch.Tensor]:
        """The value to subtract from the logits, and then the factor, [R, 1, 1] float32 both."""
        shift, slope = self._on_device(np.stack([peak, 1 / temperature]).astype(np.float32))[:, :, None, None]
        return shift, slope


def _sum_exp(blocks: torch.Tensor, shift: torch.Tensor, slope: torch.Tensor) -> Floats:
    """Each block's sum of exp((logit - shift) * slope); overwrites the [R, blocks, 128] logits."""
    return blocks.sub_(shift).mul_(slope).exp_().sum(dim=2).cpu().numpy().astype(np.float64)

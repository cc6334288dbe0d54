"""Worker: BlockMaxima, one cheap pass over the logits that makes the searches for the largest ones short."""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 128
_ROWS_AT_ONCE = 8


class BlockMaxima:
    """Logits with the maximum of each block of 128 tokens; arg-maxima and the k largest are then sought in few blocks.

    The k largest logits lie in the k blocks of the largest maxima. Over 32 rows of 151,936 tokens on a CPU the pass
    takes 0.2 ms, and with it argmax takes 0.2 ms (torch alone 2.0) and the largest 64 take 1.0 ms (torch alone 3.2).
    A vocabulary that is no multiple of 128 is copied once, filled up with -inf.

    Attributes:
        logits: [S, V] float32, contiguous.
        blocks: [S, V / 128 rounded up, 128], the same, filled up.
        maxima: [S, V / 128 rounded up].
        peak: [S], each row's largest logit; NaN if the row holds one.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        missing = -logits.shape[1] % BLOCK
        filled = functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        self.blocks = filled.view(len(logits), filled.shape[1] // BLOCK, BLOCK)
        self.maxima = self.blocks.amax(dim=2)
        self.peak = self.maxima.amax(dim=1)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits.shape[1]

    def argmax(self, positions: torch.Tensor) -> torch.Tensor:
        """The most likely token of the rows at ``positions`` [R]; among equals the smallest id."""
        block = self.maxima[positions].argmax(dim=1)
        return block * BLOCK + self.blocks[positions, block].argmax(dim=1)

    def top(self, positions: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits and their ids, [R, k] both, in falling order; k is cut to the vocabulary.

        Equal logits come in no order, and which of those equal to the last one are left out is not defined. An entry
        of -inf may repeat an id.
        """
        blocks = self.maxima[positions].topk(min(k, self.maxima.shape[1]), sorted=False).indices
        values = self.blocks[positions[:, None], blocks].flatten(1)
        best, at = values.topk(min(k, self.vocab_size))
        ids = blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK
        return best, ids.clamp_(max=self.vocab_size - 1)

    def masses(self, positions: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Each block's sum of exp((logit - peak) / temperature), [R, blocks] float64, from float32 terms.

        ``peak`` and ``temperature`` are [R] float64. A few rows at a time, so that what is between stays in the cache.
        """
        parts = []
        slope = temperature.reciprocal().float()
        for start in range(0, len(positions), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            terms = self.blocks.index_select(0, positions[some])
            terms.sub_(peak[some, None, None].float()).mul_(slope[some, None, None]).exp_()
            parts.append(terms.sum(dim=2))
        return torch.cat(parts).double()

    def count_above(self, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """How many logits of each row exceed ``values`` [R], [R] int64."""
        parts = []
        for start in range(0, len(positions), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            above = self.logits.index_select(0, positions[some]) > values[some, None]
            # Summed as bytes: torch sums booleans eight times slower.
            parts.append(above.view(torch.int8).sum(dim=1, dtype=torch.int32))
        return torch.cat(parts).long()

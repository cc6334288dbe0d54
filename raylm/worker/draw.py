"""Worker: the draw itself, a race of exponentials in two heats, keyed by seed, position and token.

Each token runs for Exponential(1) / weight, and the least time wins: it wins with probability weight / sum, exactly.
Against inverse CDF it needs no order and no cumulative sum, and it is stable: when noise moves the distribution by d
(total variation) the winner of a race changes with probability at most 2 d, since every token keeps its own random
number; an inverse CDF shifts all tokens behind the changed one, and swaps neighbours in likelihood whose order flips.

A race over a whole vocabulary would take one random number for each of its tokens. So the race is run in two heats, the
first among blocks of 512 neighbouring token ids by their total weights, the second within the winning block: about 800
numbers for 151,936 tokens, the same distribution, and the same winner whether the weights come as a few candidates or
as a whole row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from raylm.worker.block_maxima import BLOCK, BlockMaxima
from raylm.worker.random_stream import exponentials, stream_states

_BLOCKS_PER_HEAT = 4
HEAT_BLOCK = _BLOCKS_PER_HEAT * BLOCK
# Below it a temperature would overflow the float32 slope; the draw is one among the equals of the maximum long before.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of one step that are drawn at random, as columns [R] on the logits' device.

    ``positions`` (int64) say which rows of the logits; ``peak`` is the largest logit; ``peak``, ``temperature``,
    ``top_p`` and ``min_p`` are float64, ``top_k`` int64 (the vocabulary's size when off). ``block_states`` and
    ``token_states`` are the random streams of the two heats.
    """

    positions: torch.Tensor
    peak: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    block_states: torch.Tensor
    token_states: torch.Tensor

    @classmethod
    def gather(
        cls, positions: NDArray[np.int64], sampling: NDArray[np.void], num_tokens: NDArray[np.int32], peak: torch.Tensor
    ) -> RandomRows:
        """The rows at ``positions`` of a step: ``sampling``, ``num_tokens`` and ``peak`` are columns over the step."""
        mine = sampling[positions]
        floats = np.stack([np.maximum(mine["temperature"], _MIN_TEMPERATURE), mine["top_p"], mine["min_p"]])
        temperature, top_p, min_p = torch.from_numpy(floats).to(peak.device)
        where, top_k = torch.from_numpy(np.stack([positions, mine["top_k"]])).to(peak.device)
        states = stream_states(mine["seed"].copy(), num_tokens[positions], purposes=2).to(peak.device)
        return cls(where, peak[where].double(), temperature, top_p, min_p, top_k, states[0], states[1])

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def softmax(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the sums of the rows' exponentials take: positions, peak, temperature."""
        return self.positions, self.peak, self.temperature

    def take(self, index: torch.Tensor) -> RandomRows:
        """Some of the rows, by index or mask."""
        return RandomRows(*(getattr(self, column.name)[index] for column in fields(self)))


def draw_from_candidates(weights: torch.Tensor, ids: torch.Tensor, rows: RandomRows, vocab_size: int) -> torch.Tensor:
    """Draw from weights [R, C] (float64, 0 for dropped tokens) of the token ids [R, C]; gives [R] int64."""
    block_of = ids // HEAT_BLOCK
    masses = weights.new_zeros(len(ids), -(-vocab_size // HEAT_BLOCK)).scatter_add_(1, block_of, weights)
    winner = _heat(masses, rows.block_states, torch.arange(masses.shape[1], device=ids.device))
    at = _heat(weights * (block_of == winner[:, None]), rows.token_states, ids)
    return ids.gather(1, at[:, None]).squeeze(1)


def draw_from_rows(maxima: BlockMaxima, masses: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Draw from the whole distributions of the rows, given ``maxima.masses`` of them; gives [R] int64."""
    block = _first_heat(masses, rows)
    parts = block[:, None] * _BLOCKS_PER_HEAT + torch.arange(_BLOCKS_PER_HEAT, device=block.device)
    inside = parts < maxima.blocks.shape[1]
    logits = maxima.blocks[rows.positions[:, None], parts * inside].double()
    weights = ((logits - rows.peak[:, None, None]) / rows.temperature[:, None, None]).exp_()
    weights.mul_(inside[:, :, None])
    return _second_heat(weights.flatten(1), block, rows)


def draw_from_weights(weights: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Draw from the weights [V] (float64, 0 for dropped tokens) of a single row; gives [1] int64."""
    blocks = functional.pad(weights, (0, -len(weights) % HEAT_BLOCK)).view(1, -1, HEAT_BLOCK)
    block = _heat(blocks.sum(dim=2), rows.block_states, torch.arange(blocks.shape[1], device=weights.device))
    return _second_heat(blocks[0, block], block, rows)


def _first_heat(masses: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    heats = functional.pad(masses, (0, -masses.shape[1] % _BLOCKS_PER_HEAT)).view(len(masses), -1, _BLOCKS_PER_HEAT)
    return _heat(heats.sum(dim=2), rows.block_states, torch.arange(heats.shape[1], device=masses.device))


def _second_heat(weights: torch.Tensor, block: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    ids = block[:, None] * HEAT_BLOCK + torch.arange(HEAT_BLOCK, device=block.device)
    return ids.gather(1, _heat(weights, rows.token_states, ids)[:, None]).squeeze(1)


def _heat(weights: torch.Tensor, states: torch.Tensor, runners: torch.Tensor) -> torch.Tensor:
    """Which column of the weights [R, n] wins; ``runners`` [n] or [R, n] name the columns to the random stream."""
    return (exponentials(states, runners) / weights).argmin(dim=1)

"""Worker: the draw itself, a race of exponentials in two heats, keyed by seed, position and token.

Each token runs for Exponential(1) / weight, and the least time wins: it wins with probability weight / sum, exactly.
Against inverse CDF it needs no order and no cumulative sum, and it is stable: when noise moves the distribution by d
(total variation) the winner of a race changes with probability at most 2 d, since every token keeps its own random
number; an inverse CDF shifts all tokens behind the changed one, and swaps neighbours in likelihood whose order flips.

A race over a whole vocabulary would take one random number for each of its tokens. So the race is run in two heats, the
first among blocks of 512 neighbouring token ids by their total weights, the second within the winning block: about 800
numbers for 151,936 tokens, the same distribution, and the same winner whether the weights come as a few candidates or
as a whole row.

What is left to draw from is small, so it comes to the host, where numpy takes a third of torch's time per operation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.worker.sampling.block_maxima import BLOCK, BlockMaxima, Floats, Ids
from raylm.worker.sampling.random_stream import Bits, exponentials, stream_states

_BLOCKS_PER_HEAT = 4
HEAT_BLOCK = _BLOCKS_PER_HEAT * BLOCK
# Tokens have their ids in the random stream, the blocks of the first heat the numbers from here on.
_BLOCK_INDEX = 2**32
# What float32 sums of a block may exceed their bound by, with room to spare.
_ROUNDING = 1.001
# Below it a temperature would overflow the float32 slope; the draw is one among the equals of the maximum long before.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of one step that are drawn at random, as columns [R] on the host.

    ``positions`` say which rows of the logits, ``peak`` is the largest logit, ``top_k`` the vocabulary's size when
    off, and ``states`` the random streams.
    """

    positions: Ids
    peak: Floats
    temperature: Floats
    top_p: Floats
    min_p: Floats
    top_k: Ids
    states: Bits

    @classmethod
    def gather(
        cls, positions: Ids, sampling: NDArray[np.void], num_tokens: NDArray[np.integer[Any]], peak: NDArray[np.float32]
    ) -> RandomRows:
        """The rows at ``positions`` of a step; the other arguments are columns over the step."""
        mine = sampling[positions]
        return cls(
            positions,
            peak[positions].astype(np.float64),
            np.maximum(mine["temperature"], _MIN_TEMPERATURE),
            mine["top_p"],
            mine["min_p"],
            mine["top_k"],
            stream_states(mine["seed"], num_tokens[positions]),
        )

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def softmax(self) -> tuple[Ids, Floats, Floats]:
        """What sums of the rows' weights take: positions, peak and temperature."""
        return self.positions, self.peak, self.temperature

    def take(self, index: NDArray[Any]) -> RandomRows:
        """Some of the rows, by index or mask."""
        return RandomRows(*(getattr(self, column.name)[index] for column in fields(self)))

    def weights(self, logits: NDArray[np.float32]) -> Floats:
        """exp((logit - peak) / temperature) of logits [R, n] of these rows."""
        scaled = (logits - self.peak[:, None]) / self.temperature[:, None]
        return np.exp(scaled, out=scaled)


def draw_from_candidates(weights: Floats, ids: Ids, rows: RandomRows, vocab_size: int) -> Ids:
    """Draw from weights [R, C] (0 for dropped tokens) of the token ids [R, C]; gives [R]."""
    count = -(-vocab_size // HEAT_BLOCK)
    block_of = ids // HEAT_BLOCK
    cells = block_of + count * np.arange(len(ids))[:, None]
    masses = np.bincount(cells.ravel(), weights.ravel(), minlength=count * len(ids)).astype(np.float64, copy=False)
    block = _first_heat(masses.reshape(len(ids), count), rows)
    return _second_heat(weights * (block_of == block[:, None]), ids, rows)


def draw_from_rows(maxima: BlockMaxima, rows: RandomRows) -> Ids:
    """Draw from the whole distributions of the rows; gives [R].

    A block of 512 weighs at least the sum of its parts' largest weights and at most 128 times that. Only blocks that
    could still win by these bounds are weighed, a few of them in a language model's distribution.
    """
    least = _group(rows.weights(maxima.highest(rows.positions)), _BLOCKS_PER_HEAT).sum(axis=2)
    times = exponentials(rows.states, _block_indexes(least.shape[1]))
    scores = least / times
    row, block = np.nonzero(scores * (BLOCK * _ROUNDING) >= scores.max(axis=1, keepdims=True))
    if len(row) > least.size // 3:
        parts = _group(maxima.masses(*rows.softmax), _BLOCKS_PER_HEAT)
        winners = (parts.sum(axis=2) / times).argmax(axis=1)
    else:
        parts = maxima.window_masses(*rows.take(row).softmax, block * _BLOCKS_PER_HEAT, _BLOCKS_PER_HEAT)
        scores = np.zeros_like(least)
        scores[row, block] = parts.sum(axis=1) / times[row, block]
        winners = scores.argmax(axis=1)
    logits = maxima.window(rows.positions, winners * _BLOCKS_PER_HEAT, _BLOCKS_PER_HEAT).flatten(1).cpu().numpy()
    return _second_heat(rows.weights(logits), _ids_of(winners), rows)


def draw_from_weights(weights: torch.Tensor, row: RandomRows) -> Ids:
    """Draw from the weights [V] (float64, 0 for dropped tokens) of a single row; gives [1]."""
    heats = _group(weights.cpu().numpy()[None], HEAT_BLOCK)
    block = _first_heat(heats.sum(axis=2), row)
    return _second_heat(heats[0, block], _ids_of(block), row)


def _group(values: Floats, size: int) -> Floats:
    """[R, n] as [R, n / size rounded up, size], filled up with 0."""
    count, width = values.shape
    groups = np.zeros((count, -(-width // size), size))
    groups.reshape(count, -1)[:, :width] = values
    return groups


def _ids_of(block: Ids) -> Ids:
    return block[:, None] * HEAT_BLOCK + np.arange(HEAT_BLOCK)


def _first_heat(masses: Floats, rows: RandomRows) -> Ids:
    winners: Ids = (masses / exponentials(rows.states, _block_indexes(masses.shape[1]))).argmax(axis=1)
    return winners


def _block_indexes(count: int) -> Ids:
    return np.arange(_BLOCK_INDEX, _BLOCK_INDEX + count)


def _second_heat(weights: Floats, ids: Ids, rows: RandomRows) -> Ids:
    winners: Ids = ids[np.arange(len(ids)), (weights / exponentials(rows.states, ids)).argmax(axis=1)]
    return winners

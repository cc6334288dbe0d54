"""Draws tokens by a race of exponentials, keyed by seed, position and token.

Each token gets a time Exponential(1) / weight, and the smallest time wins. A token wins with probability weight / sum,
exactly (the Gumbel-max trick without logarithms; vLLM uses it too). Compared with the inverse CDF, it needs no order
and no cumulative sum. Noise that moves the distribution by d (total variation) changes the winner with probability at
most 2 d.

A race over the whole vocabulary would need a random number for each token. So there are two races: the first between
groups of 512 neighbouring token ids by their total weights, the second within the winning group. This takes about 800
numbers for 151,936 tokens, and has the same distribution. The winner is the same if the weights are given as a few
candidates or as a whole row.

The random numbers are a pure function of (seed, position of the token in its sequence, index), so other rows, order,
preemption and restarts do not change them. The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, with the finalizer of Stafford's variant 13), nested: the n-th output of
one generator is the state of the next. It takes nine vector operations for 64 bits; Philox4x32-10 takes about fifty.

The remaining data is small, so it is copied to the host, where numpy takes a third of torch's time for an operation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.worker.arrays import Floats, Floats32, IntArray, Ints
from raylm.worker.sampling.block_maxima import BLOCK, BlockMaxima

Bits = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

_BLOCKS_IN_GROUP = 4
GROUP = _BLOCKS_IN_GROUP * BLOCK
# Tokens use their ids as indexes of random numbers. The groups of the first race use the indexes from here on.
GROUP_INDEX = 2**32
# Float32 sums of a block may exceed their bound by this factor, with a margin.
_ROUNDING = 1.001
# A smaller temperature would overflow the float32 slope. At this temperature only tokens equal to the maximum are
# drawn.
MIN_TEMPERATURE = 1e-30


def nth_output(states: Bits, index: Bits) -> Bits:
    """The ``index``-th output (from 0) of SplitMix64 in ``states``, broadcast. Products wrap."""
    mixed = (index + np.uint64(1)) * _GAMMA + states
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stream_states(seeds: Ints, positions: IntArray) -> Bits:
    """The generator state of each (seed, position), both [R]."""
    return nth_output(seeds.astype(np.uint64), positions.astype(np.uint64))


def exponentials(states: Bits, index: Ints) -> Floats:
    """Standard exponential variates, positive and finite, for each state [R] and index [n] or [R, n]."""
    bits = nth_output(states[:, None], index.astype(np.uint64)) >> np.uint64(12)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return np.negative(np.log(uniform, out=uniform), out=uniform)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of one step that are drawn at random, as columns [R] on the host.

    ``positions`` are the rows of the logits, ``peak`` the largest logit, ``top_k`` the vocabulary's size when off, and
    ``states`` the generators.
    """

    positions: Ints
    peak: Floats
    temperature: Floats
    top_p: Floats
    min_p: Floats
    top_k: Ints
    states: Bits

    @classmethod
    def gather(cls, positions: Ints, sampling: NDArray[np.void], num_tokens: IntArray, peak: Floats32) -> RandomRows:
        """Gather the rows at ``positions`` of a step. The other arguments are columns over the step."""
        mine = sampling[positions]
        return cls(
            positions,
            peak[positions].astype(np.float64),
            np.maximum(mine["temperature"], MIN_TEMPERATURE),
            mine["top_p"],
            mine["min_p"],
            mine["top_k"],
            stream_states(mine["seed"], num_tokens[positions]),
        )

    @property
    def softmax(self) -> tuple[Ints, Floats, Floats]:
        """The arguments of sums of weights: positions, peak and temperature."""
        return self.positions, self.peak, self.temperature

    def take(self, index: NDArray[Any]) -> RandomRows:
        """Select rows by index or mask."""
        return RandomRows(*(getattr(self, column.name)[index] for column in fields(self)))

    def weights(self, logits: Floats32) -> Floats:
        """exp((logit - peak) / temperature) for logits [R, n] of these rows."""
        scaled = (logits - self.peak[:, None]) / self.temperature[:, None]
        return np.exp(scaled, out=scaled)


def draw_from_candidates(weights: Floats, ids: Ints, rows: RandomRows, vocab_size: int) -> Ints:
    """Draw from weights [R, C] (0 for dropped tokens) of the token ids [R, C]. Returns [R]."""
    count = -(-vocab_size // GROUP)
    group_of = ids // GROUP
    cells = group_of + count * np.arange(len(ids))[:, None]
    masses = np.bincount(cells.ravel(), weights.ravel(), minlength=count * len(ids)).astype(np.float64, copy=False)
    group = (masses.reshape(len(ids), count) / exponentials(rows.states, _group_indexes(count))).argmax(axis=1)
    return _draw_token(weights * (group_of == group[:, None]), ids, rows)


def draw_from_rows(maxima: BlockMaxima, rows: RandomRows) -> Ints:
    """Draw from the whole distributions of the rows. Returns [R].

    The weight of a group is at least the sum of its blocks' largest weights, and at most 128 times that. Only groups
    that could still win by these bounds are weighed; in a language model's distribution these are few.
    """
    least = _grouped(rows.weights(maxima.highest(rows.positions)), _BLOCKS_IN_GROUP).sum(axis=2)
    times = exponentials(rows.states, _group_indexes(least.shape[1]))
    scores = least / times
    row, group = np.nonzero(scores * (BLOCK * _ROUNDING) >= scores.max(axis=1, keepdims=True))
    if len(row) > least.size // 3:
        masses = _grouped(maxima.masses(*rows.softmax), _BLOCKS_IN_GROUP)
        winners = (masses.sum(axis=2) / times).argmax(axis=1)
    else:
        masses = maxima.window_masses(*rows.take(row).softmax, group * _BLOCKS_IN_GROUP, _BLOCKS_IN_GROUP)
        scores = np.zeros_like(least)
        scores[row, group] = masses.sum(axis=1) / times[row, group]
        winners = scores.argmax(axis=1)
    logits = maxima.window(rows.positions, winners * _BLOCKS_IN_GROUP, _BLOCKS_IN_GROUP).flatten(1).cpu().numpy()
    return _draw_token(rows.weights(logits), _ids_of(winners), rows)


def draw_from_weights(weights: torch.Tensor, row: RandomRows) -> Ints:
    """Draw from the weights [V] (float64, 0 for dropped tokens) of a single row. Returns [1]."""
    grouped = _grouped(weights.cpu().numpy()[None], GROUP)
    group = (grouped.sum(axis=2) / exponentials(row.states, _group_indexes(grouped.shape[1]))).argmax(axis=1)
    return _draw_token(grouped[0, group], _ids_of(group), row)


def _grouped(values: Floats, size: int) -> Floats:
    """Reshape [R, n] to [R, ceil(n / size), size], padded with 0."""
    count, width = values.shape
    groups = np.zeros((count, -(-width // size), size))
    groups.reshape(count, -1)[:, :width] = values
    return groups


def _ids_of(group: Ints) -> Ints:
    return group[:, None] * GROUP + np.arange(GROUP)


def _group_indexes(count: int) -> Ints:
    return np.arange(GROUP_INDEX, GROUP_INDEX + count)


def _draw_token(weights: Floats, ids: Ints, rows: RandomRows) -> Ints:
    winners: Ints = ids[np.arange(len(ids)), (weights / exponentials(rows.states, ids)).argmax(axis=1)]
    return winners

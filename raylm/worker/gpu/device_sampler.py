"""Draws tokens on the device with the same random numbers as Sampler.

All operations have fixed shapes and no number is copied to the host, so nothing waits. The algorithms are those of
truncation.py and draw.py. Weights are float32 here. Top-p sums them as integers, so that the sum does not depend on the
order. A token differs from the host's only if two tokens are equal within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raylm.worker.arrays import IntArray, slices
from raylm.worker.input_buffers import Column
from raylm.worker.sampling.draw import GROUP, GROUP_INDEX, MIN_TEMPERATURE, stream_states

# SplitMix64's constants as signed numbers. torch's signed products wrap like unsigned ones.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64

_ROWS_AT_ONCE = 32  # bounds temporary memory: several 64-bit numbers for each token of the vocabulary
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the 32 bits of a float32, highest first
_UNIT = 2.0**40  # weights are multiplied by this and summed as integers: 2^18 of them stay below 2^63
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of a step's rows on the device, (rows,) each. ``states`` are the generators' bits.

    ``by_top_k``, ``by_top_p`` and ``by_min_p`` are whether any row uses the parameter.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    states: Tensor
    by_top_k: bool
    by_top_p: bool
    by_min_p: bool

    def take(self, part: slice) -> SamplingColumns:
        names = "temperature", "top_p", "min_p", "top_k", "states"
        return replace(self, **{name: getattr(self, name)[part] for name in names})


class SamplingUploads:
    """Pinned memory for the columns of one step."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._floats = Column((3, max_num_seqs), torch.float64, device)
        self._integers = Column((2, max_num_seqs), torch.int64, device)

    def upload(self, sampling: NDArray[np.void], num_tokens: IntArray, vocab_size: int) -> SamplingColumns:
        """Upload ``sampling`` of the rows (SAMPLING_DTYPE). ``num_tokens`` is the number of tokens before the draw."""
        count = len(sampling)
        floats, integers = self._floats.host[:, :count], self._integers.host[:, :count]
        floats[0], floats[1], floats[2] = sampling["temperature"], sampling["top_p"], sampling["min_p"]
        np.maximum(floats[0], MIN_TEMPERATURE, out=floats[0], where=floats[0] > 0)
        integers[0] = sampling["top_k"]
        integers[1] = stream_states(sampling["seed"], num_tokens).view(np.int64)
        temperature, top_p, min_p = self._floats.upload(3)[:, :count]
        top_k, states = self._integers.upload(2)[:, :count]
        drawn = sampling[sampling["temperature"] > 0]
        asked = drawn["top_k"] < vocab_size, drawn["top_p"] < 1, drawn["min_p"] > 0
        return SamplingColumns(temperature, top_p, min_p, top_k, states, *(bool(rows.any()) for rows in asked))


def draw(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Draw the next tokens (rows,) int64 from float32 ``logits`` (rows, vocab_size); greedy at temperature 0."""
    pieces = slices(len(logits), _ROWS_AT_ONCE)
    return torch.cat([_draw(logits[part], columns.take(part)) for part in pieces])


def _draw(logits: Tensor, columns: SamplingColumns) -> Tensor:
    greedy = columns.temperature == 0
    temperature = columns.temperature.masked_fill(greedy, 1.0)[:, None]
    peak = logits.amax(dim=1, keepdim=True)
    weights = logits.sub(peak).mul_(1 / temperature.float()).exp_()
    if columns.by_min_p or columns.by_top_k or columns.by_top_p:
        weights = truncate(logits, weights, columns)
    missing = -weights.shape[1] % GROUP
    grouped = functional.pad(weights, (0, missing)).view(len(logits), -1, GROUP)
    indexes = torch.arange(grouped.shape[1], device=logits.device) + GROUP_INDEX
    group = (grouped.sum(dim=2).double() / exponentials(columns.states, indexes)).argmax(dim=1)[:, None]
    ids = group * GROUP + torch.arange(GROUP, device=logits.device)
    places = ids.clamp(max=logits.shape[1] - 1)
    kept = (weights.gather(1, places) > 0) & (ids < logits.shape[1])
    exact = ((logits.gather(1, places).double() - peak) / temperature).exp_()
    scores = torch.where(kept, exact, 0.0) / exponentials(columns.states, ids)
    drawn = ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    return torch.where(greedy, logits.argmax(dim=1), drawn)


def nth_output(states: Tensor, index: Tensor) -> Tensor:
    """As draw.nth_output, for int64 with the same bits."""
    mixed = (index + 1) * _GAMMA + states
    mixed = (mixed ^ _shifted(mixed, 30)) * _MULTIPLIER_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MULTIPLIER_2
    return mixed ^ _shifted(mixed, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right. torch's shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def exponentials(states: Tensor, index: Tensor) -> Tensor:
    """As draw.exponentials: float64, for each state (rows,) and index (n,) or (rows, n)."""
    bits = _shifted(nth_output(states[:, None], index), 12)
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def truncate(logits: Tensor, weights: Tensor, columns: SamplingColumns) -> Tensor:
    """Set ``weights`` (rows, vocab_size) to 0 for tokens dropped by min_p, top_k and top_p, in this order."""
    # Convert floats to integers in the same order. Both zeros become equal.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    kept = weights >= columns.min_p[:, None]
    if columns.by_top_k:
        kth, _ = descend(keys, torch.ones_like(keys), columns.top_k)
        kept &= keys >= kth[:, None]
    return weights * (_nucleus(keys, weights, kept, columns) if columns.by_top_p else kept)


def _nucleus(keys: Tensor, weights: Tensor, kept: Tensor, columns: SamplingColumns) -> Tensor:
    """The tokens of ``kept`` (rows, vocab_size) that top_p keeps."""
    masses = weights.mul(kept).mul_(_UNIT).long()
    share = (columns.top_p * masses.sum(dim=1)).ceil().long().clamp_(min=1)
    wanted = torch.where(columns.top_p < 1, share, _ALL)
    cut, above = descend(keys, masses, wanted)
    # Of the tokens equal to the cut, keep those with the smallest ids until the share is reached.
    equal = kept & (keys == cut[:, None])
    each = torch.where(equal, masses, 0).amax(dim=1).clamp_(min=1)
    count = (wanted - above + each - 1) // each
    return kept & ((keys > cut[:, None]) | (equal & (equal.cumsum(dim=1) <= count[:, None])))


def descend(keys: Tensor, masses: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The key at which the sum of ``masses``, from the largest key down, reaches ``wanted``; and the sum above it.

    ``keys`` (rows, n) of 32 bits, ``masses`` (rows, n), ``wanted`` (rows,), all int64. The key is 0 if the whole sum is
    less than ``wanted``.
    """
    prefix, above = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for shift, bits in _DIGITS:
        digits = (keys >> shift) & ((1 << bits) - 1)
        inside = (keys >> (shift + bits)) == prefix[:, None]
        sums = masses.new_zeros(len(keys), 1 << bits).scatter_add_(1, digits, masses * inside).flip(1)
        reached = sums.cumsum(dim=1) + above[:, None]
        at = (reached < wanted[:, None]).sum(dim=1, keepdim=True).clamp_(max=(1 << bits) - 1)
        above = (reached - sums).gather(1, at)[:, 0]
        prefix = (prefix << bits) | ((1 << bits) - 1 - at[:, 0])
    return prefix, above

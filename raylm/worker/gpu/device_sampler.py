"""Draws tokens on the device with the same random numbers as Sampler.

All operations have fixed shapes and no number is copied to the host, so nothing waits. The algorithms are those of
truncation.py and draw.py. Weights are float32 here. Top-p sums them as integers, so that the sum does not depend on the
order. A token differs from the host's only if two tokens are equal within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

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

_CHUNK = 4096  # logits of one program that finds the largest
_TRUNCATED = 2048  # logits of one program that truncates
_GROUPS = 4  # groups of one program of the first race
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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest logit of each row, (rows,) float32, and the first token that has it, (rows,) int64.

    A row with NaN has NaN, and any token.
    """

    values: Tensor
    tokens: Tensor


class DeviceSampler:
    """Finds the largest logits, and draws tokens, with torch's operations."""

    def compile_all(self, vocab_size: int, device: torch.device) -> None:
        """Compile the kernels for a vocabulary."""

    def peaks(self, logits: Tensor) -> Peaks:
        """Of float32 ``logits`` (rows, vocab_size)."""
        return Peaks(*logits.max(dim=1))

    rows_at_once = 32  # bounds temporary memory: several 64-bit numbers for each token of the vocabulary

    def draw(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns) -> Tensor:
        """Draw the next tokens (rows,) int64 from float32 ``logits`` (rows, vocab_size); greedy at temperature 0."""
        pieces = slices(len(logits), self.rows_at_once)
        found = [(logits[part], Peaks(peaks.values[part], peaks.tokens[part]), columns.take(part)) for part in pieces]
        return torch.cat([self._race(*piece, self.kept_weights(*piece)) for piece in found])

    def kept_weights(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns) -> Tensor | None:
        """The weights, 0 for tokens that min_p, top_k or top_p drop; None if no row uses these."""
        if not (columns.by_min_p or columns.by_top_k or columns.by_top_p):
            return None
        return self._truncate(logits, peaks, columns)

    def _truncate(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns) -> Tensor:
        return truncate(logits, _weights(logits, peaks, columns), columns)

    def _race(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns, kept: Tensor | None) -> Tensor:
        greedy, temperature, peak = columns.temperature == 0, _heat(columns), peaks.values[:, None]
        weights = _weights(logits, peaks, columns) if kept is None else kept
        missing = -weights.shape[1] % GROUP
        grouped = functional.pad(weights, (0, missing)).view(len(logits), -1, GROUP)
        indexes = torch.arange(grouped.shape[1], device=logits.device) + GROUP_INDEX
        group = (grouped.sum(dim=2).double() / exponentials(columns.states, indexes)).argmax(dim=1)[:, None]
        ids = group * GROUP + torch.arange(GROUP, device=logits.device)
        places = ids.clamp(max=logits.shape[1] - 1)
        possible = (weights.gather(1, places) > 0) & (ids < logits.shape[1])
        exact = ((logits.gather(1, places).double() - peak) / temperature).exp_()
        scores = torch.where(possible, exact, 0.0) / exponentials(columns.states, ids)
        drawn = ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(greedy, peaks.tokens, drawn)


class TritonSampler(DeviceSampler):
    """With four launches (``sampling_kernels``): two read all logits, two merge the results.

    Truncation (``truncation_kernels``) takes one launch for min-p, eight more for top-k, and nine more for top-p.
    """

    rows_at_once = 256  # a 32-bit weight for each token of the vocabulary

    def compile_all(self, vocab_size: int, device: torch.device) -> None:
        logits = torch.zeros(1, vocab_size, device=device)
        peaks, floats = self.peaks(logits), torch.zeros(1, dtype=torch.float64, device=device)
        columns = SamplingColumns(floats, floats, floats, peaks.tokens, peaks.tokens, True, True, True)
        for kept in (None, self._truncate(logits, peaks, columns)):
            self._race(logits, peaks, columns, kept)

    def peaks(self, logits: Tensor) -> Peaks:
        from raylm.worker.gpu import sampling_kernels

        (rows, vocab_size), chunks = logits.shape, -(-logits.shape[1] // _CHUNK)
        if not rows:  # a step of partial prompts draws no token
            return super().peaks(logits)
        values, places = logits.new_empty(rows, chunks), logits.new_empty(rows, chunks, dtype=torch.int32)
        found = Peaks(logits.new_empty(rows), logits.new_empty(rows, dtype=torch.int64))
        sampling_kernels.find_peaks[rows, chunks](logits, values, places, logits.stride(0), vocab_size, CHUNK=_CHUNK)
        width = 1 << (chunks - 1).bit_length()
        sampling_kernels.merge_peaks[rows,](
            values, places, found.values, found.tokens, chunks, vocab_size, WIDTH=width, num_warps=1
        )
        return found

    def _truncate(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns) -> Tensor:
        from raylm.worker.gpu import truncation_kernels as kernels

        (rows, vocab_size), chunks = logits.shape, -(-logits.shape[1] // _TRUNCATED)
        state = logits.new_zeros(2, rows, kernels.LEVELS, kernels.SLOTS, dtype=torch.int64)
        equals = logits.new_zeros(rows, chunks, dtype=torch.int32)
        kept = logits.new_empty(rows, vocab_size)
        limits = columns.min_p.contiguous(), columns.top_k.contiguous(), columns.top_p.contiguous()
        values, sizes, grid = (
            (logits, peaks.values, columns.temperature.contiguous()),
            (logits.stride(0), vocab_size),
            (rows, chunks),
        )
        for by_mass in [False] * columns.by_top_k + [True] * columns.by_top_p:
            for level in range(kernels.LEVELS):
                kernels.sum_digits[grid](*values, *limits, *state, level, *sizes, BY_MASS=by_mass, CHUNK=_TRUNCATED)
        if columns.by_top_p:
            kernels.count_equal[grid](logits, limits[2], state[1], equals, *sizes, CHUNK=_TRUNCATED)
        width = 1 << (chunks - 1).bit_length()
        kernels.keep_tokens[grid](*values, *limits, *state, equals, kept, *sizes, CHUNK=_TRUNCATED, WIDTH=width)
        return kept

    def _race(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns, kept: Tensor | None) -> Tensor:
        from raylm.worker.gpu import sampling_kernels

        (rows, vocab_size), groups = logits.shape, -(-logits.shape[1] // GROUP)
        scores = logits.new_empty(rows, groups, dtype=torch.float64)
        tokens = torch.empty_like(peaks.tokens)
        sizes, weights = (logits.stride(0), vocab_size, groups), logits if kept is None else kept
        by_row = columns.temperature.contiguous(), columns.states.contiguous()
        sampling_kernels.race_groups[rows, -(-groups // _GROUPS)](
            logits, weights, peaks.values, *by_row, scores, *sizes, GROUP_INDEX,
            HAS_WEIGHTS=kept is not None, GROUP=GROUP, GROUPS=_GROUPS,
        )  # fmt: skip
        sampling_kernels.race_tokens[rows,](
            logits, weights, peaks.values, peaks.tokens, *by_row, scores, tokens, *sizes,
            HAS_WEIGHTS=kept is not None, GROUP=GROUP, WIDTH=1 << (groups - 1).bit_length(),
        )  # fmt: skip
        return tokens


def sampler_for(device: torch.device) -> DeviceSampler:
    """The sampler of a device: with kernels where there is Triton."""
    return TritonSampler() if device.type == "cuda" and find_spec("triton") is not None else DeviceSampler()


def _heat(columns: SamplingColumns) -> Tensor:
    """Temperatures (rows, 1), 1 for greedy rows."""
    return columns.temperature.masked_fill(columns.temperature == 0, 1.0)[:, None]


def _weights(logits: Tensor, peaks: Peaks, columns: SamplingColumns) -> Tensor:
    """Unnormalized probabilities (rows, vocab_size); the largest is 1."""
    return logits.sub(peaks.values[:, None]).mul_(1 / _heat(columns).float()).exp_()


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

"""Triton kernels that truncate a distribution by min-p, top-k and top-p. Logits are float32, each row contiguous.

The algorithm is that of ``device_sampler.descend``: it finds the cut four bits of a logit's key at a time, the highest
first. Each launch of ``sum_digits`` takes the tokens that have the digits found so far, and sums their masses by the
next digit. Masses are integers, so the sums do not depend on the order of the programs. ``state`` is (rows, LEVELS,
SLOTS) int64, zero at first. A level has the sums of 16 digits, the number of the digits found before, and the mass
above that number. A state of zeros drops no token. Compile-time constants are in capitals.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

_LEVELS: tl.constexpr = tl.constexpr(8)
_DIGITS: tl.constexpr = tl.constexpr(16)
_SLOTS: tl.constexpr = tl.constexpr(18)
_ALL: tl.constexpr = tl.constexpr(2**62)
LEVELS, SLOTS = int(_LEVELS), int(_SLOTS)


@triton.jit
def _key(logits: tl.tensor) -> tl.tensor:
    """uint32 in the order of the floats. Both zeros are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ (bits >> 31) & 0x7FFFFFFF).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    """The float of a key."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ (bits >> 31) & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Unnormalized probabilities; that of the peak is 1. Temperature 0 counts as 1."""
    return tl.exp((logits - peak) * (1.0 / tl.where(temperature == 0.0, 1.0, temperature).to(tl.float32)))


@triton.jit
def _mass(weights: tl.tensor) -> tl.tensor:
    """As an integer; 0 for NaN."""
    return (tl.where(weights <= 1.0, weights, 0.0) * 1099511627776.0).to(tl.int64)  # 2^40


@triton.jit
def _next_digit(sums: tl.tensor, wanted: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The digits after one level: those of the key at which the mass, from the largest key down, reaches ``wanted``.

    And the mass above all keys that begin with these digits. ``sums`` points to the level.
    """
    at = tl.arange(0, _DIGITS)
    each = tl.load(sums + _DIGITS - 1 - at)
    reached = tl.cumsum(each, 0) + tl.load(sums + _DIGITS + 1)
    place = tl.minimum(tl.sum((reached < wanted).to(tl.int64), 0), _DIGITS - 1)
    above = tl.sum(tl.where(at == place, reached - each, 0), 0)
    return tl.load(sums + _DIGITS) * _DIGITS + _DIGITS - 1 - place, above


@triton.jit
def _cut(state: tl.tensor, wanted: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The key that a complete state finds (uint32), and the mass above it."""
    key, above = _next_digit(state + (_LEVELS - 1) * _SLOTS, wanted)
    return key.to(tl.uint32), above


@triton.jit
def _share(state: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """The mass that ``top_p`` keeps of the sums of the first level."""
    total = tl.sum(tl.load(state + tl.arange(0, _DIGITS)), 0)
    share = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
    return tl.where(top_p < 1.0, share, _ALL)


@triton.jit
def _possible(weight: tl.tensor, key: tl.tensor, min_p: tl.tensor, counts: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    """Whether ``min_p`` and the complete ``counts`` keep a token."""
    kth, _ = _cut(counts, top_k)
    return (weight.to(tl.float64) >= min_p) & (key >= kth)


@triton.jit(do_not_specialize=["level"], do_not_specialize_on_alignment=["temperature", "min_p", "top_k", "top_p"])
def sum_digits(
    logits: tl.tensor,
    peaks: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    level: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add a chunk of a row to the sums of one level: of ``counts``, for top-k, or else of ``masses``, for top-p.

    ``masses`` leaves out the tokens that ``min_p`` and the complete ``counts`` drop.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts, masses = counts + row * _LEVELS * _SLOTS, masses + row * _LEVELS * _SLOTS
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocab_size
    values = tl.load(logits + row * stride + at, mask=there, other=float("-inf"))
    key = _key(values)
    if BY_MASS:
        state, wanted = masses, _share(masses, tl.load(top_p + row))
        weight = _weight(values, tl.load(peaks + row), tl.load(temperature + row))
        possible = _possible(weight, key, tl.load(min_p + row), counts, tl.load(top_k + row))
        mass = tl.where(possible & there, _mass(weight), 0)
    else:
        state, wanted, mass = counts, tl.load(top_k + row), there.to(tl.int64)
    prefix, above = _next_digit(state + tl.maximum(level - 1, 0) * _SLOTS, wanted)
    prefix, above = tl.where(level > 0, prefix, 0), tl.where(level > 0, above, 0)
    sums = state + level * _SLOTS
    if chunk == 0:
        tl.store(sums + _DIGITS, prefix)
        tl.store(sums + _DIGITS + 1, above)
    digits = key >> (28 - level * 4).to(tl.uint32)
    first = (prefix * _DIGITS).to(tl.uint32)
    if tl.sum(((digits >> 4) == (first >> 4)).to(tl.int32), 0) > 0:
        each = tl.arange(0, _DIGITS)
        found = tl.zeros((_DIGITS,), tl.int64)
        for digit in tl.static_range(_DIGITS):
            found = tl.where(each == digit, tl.sum(tl.where(digits == first + digit, mass, 0), 0), found)
        tl.atomic_add(sums + each, found, mask=found > 0)


@triton.jit(do_not_specialize_on_alignment=["top_p"])
def count_equal(
    logits: tl.tensor,
    top_p: tl.tensor,
    masses: tl.tensor,
    equals: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The number of tokens at the cut of top-p in each chunk of a row: ``equals`` (rows, chunks) int32."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    masses += row * _LEVELS * _SLOTS
    cut, _ = _cut(masses, _share(masses, tl.load(top_p + row)))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocab_size
    key = _key(tl.load(logits + row * stride + at, mask=there, other=0.0))
    tl.store(equals + row * tl.num_programs(1) + chunk, tl.sum(((key == cut) & there).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "min_p", "top_k", "top_p"])
def keep_tokens(
    logits: tl.tensor,
    peaks: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    equals: tl.tensor,
    kept: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the weights to ``kept`` (rows, vocab_size) float32, 0 for dropped tokens.

    Of the tokens at the cut of top-p, those with the smallest ids are kept until its share is reached.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts, masses = counts + row * _LEVELS * _SLOTS, masses + row * _LEVELS * _SLOTS
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocab_size
    values = tl.load(logits + row * stride + at, mask=there, other=float("-inf"))
    key, peak, heat = _key(values), tl.load(peaks + row), tl.load(temperature + row)
    weight = _weight(values, peak, heat)
    possible = _possible(weight, key, tl.load(min_p + row), counts, tl.load(top_k + row))
    wanted = _share(masses, tl.load(top_p + row))
    cut, above = _cut(masses, wanted)
    each = tl.maximum(_mass(_weight(_logit(cut), peak, heat)), 1)
    count = (wanted - above + each - 1) // each
    chunks = tl.arange(0, WIDTH)
    earlier = tl.sum(tl.load(equals + row * tl.num_programs(1) + chunks, mask=chunks < chunk, other=0), 0)
    equal = (key == cut) & there
    rank = earlier + tl.cumsum(equal.to(tl.int32), 0)
    nucleus = (key > cut) | (equal & (rank <= count))
    tl.store(kept + row * vocab_size + at, tl.where(possible & nucleus, weight, 0.0), mask=there)

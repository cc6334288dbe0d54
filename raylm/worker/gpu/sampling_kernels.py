"""Triton kernels that find the largest logits and draw tokens. Logits are float32, each row contiguous.

The draw is the race of exponentials of ``raylm.worker.sampling.draw``, with the same random numbers. Compile-time
constants are in capitals.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _first_largest(values: tl.tensor, at: tl.tensor, none: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest of ``values`` and the smallest ``at`` that has it. NaN, and ``none``, if any value is NaN."""
    is_nan = values != values
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    place = tl.min(tl.where(values == largest, at, none), 0)
    return tl.where(has_nan, float("nan"), largest), tl.where(has_nan, none, place)


@triton.jit
def find_peaks(
    logits: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The largest logit of each chunk of a row, and its first place. ``peaks`` and ``places`` are (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf"))
    largest, place = _first_largest(values, at, vocab_size)
    tl.store(peaks + row * tl.num_programs(1) + chunk, largest)
    tl.store(places + row * tl.num_programs(1) + chunk, place)


@triton.jit
def merge_peaks(
    peaks: tl.tensor,
    places: tl.tensor,
    peak: tl.tensor,
    token: tl.tensor,
    chunks: tl.tensor,
    vocab_size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """The largest logit of a row and its first token, of those of its chunks. The token is 0 if a logit is NaN."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there = at < chunks
    values = tl.load(peaks + row * chunks + at, mask=there, other=float("-inf"))
    first = tl.load(places + row * chunks + at, mask=there, other=vocab_size)
    largest, place = _first_largest(values, first, vocab_size)
    tl.store(peak + row, largest)
    tl.store(token + row, tl.where(place < vocab_size, place, 0).to(tl.int64))


@triton.jit
def _times(state: tl.tensor, index: tl.tensor) -> tl.tensor:
    """As ``draw.exponentials``: float64 for each ``index``."""
    mixed = (index.to(tl.uint64) + 1) * _GAMMA + state
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER_1
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIER_2
    bits = (mixed ^ (mixed >> 31)) >> 12
    return -tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16)  # 2^-52


@triton.jit(do_not_specialize_on_alignment=["temperature", "states"])
def race_groups(
    logits: tl.tensor,
    weights: tl.tensor,
    peaks: tl.tensor,
    temperature: tl.tensor,
    states: tl.tensor,
    scores: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    groups: tl.tensor,
    first_index: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """The score of GROUPS groups of a row's tokens in the first race: their weight over their time.

    ``scores`` is (rows, groups) float64. ``weights`` (rows, vocab_size) float32 are given if some tokens are dropped.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = at < vocab_size
    if HAS_WEIGHTS:
        each = tl.load(weights + row * vocab_size + at, mask=there, other=0.0)
    else:
        heat = tl.load(temperature + row)
        slope = 1.0 / tl.where(heat == 0.0, 1.0, heat).to(tl.float32)
        each = tl.exp((tl.load(logits + row * stride + at, mask=there, other=0.0) - tl.load(peaks + row)) * slope)
        each = tl.where(there, each, 0.0)
    mass = tl.sum(each, 1).to(tl.float64)
    state = tl.load(states + row).to(tl.uint64, bitcast=True)
    score = mass / _times(state, group.to(tl.int64) + first_index)
    tl.store(scores + row * groups + group, score, mask=group < groups)


@triton.jit(do_not_specialize_on_alignment=["temperature", "states"])
def race_tokens(
    logits: tl.tensor,
    weights: tl.tensor,
    peaks: tl.tensor,
    greedy: tl.tensor,
    temperature: tl.tensor,
    states: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    groups: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The token of a row that wins the second race, within the group that wins the first; ``greedy`` at temperature 0.

    Weights are float64 here. Tokens whose float32 weight is 0 are not drawn.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    score = tl.load(scores + row * groups + at, mask=at < groups, other=-1.0)
    _, group = _first_largest(score, at, groups)
    group = tl.where(group < groups, group, 0)
    token = group * GROUP + tl.arange(0, GROUP)
    there = token < vocab_size
    heat, peak = tl.load(temperature + row), tl.load(peaks + row)
    sampled = heat != 0.0
    heat = tl.where(sampled, heat, 1.0)
    logit = tl.load(logits + row * stride + token, mask=there, other=0.0)
    if HAS_WEIGHTS:
        kept = tl.load(weights + row * vocab_size + token, mask=there, other=0.0) > 0.0
    else:
        kept = there & (tl.exp((logit - peak) * (1.0 / heat.to(tl.float32))) > 0.0)
    exact = tl.exp((logit.to(tl.float64) - peak) / heat)
    state = tl.load(states + row).to(tl.uint64, bitcast=True)
    score = tl.where(kept, exact, 0.0) / _times(state, token.to(tl.int64))
    _, drawn = _first_largest(score, token, vocab_size)
    drawn = tl.where(drawn < vocab_size, drawn, 0)
    tl.store(tokens + row, tl.where(sampled, drawn.to(tl.int64), tl.load(greedy + row)))

"""Triton kernels with one or several programs for each token. All tensors are contiguous.

Compile-time constants are in capitals, as in Triton's own kernels.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from raylm.models.gpu.dependent_launch import wait_for_previous


@triton.jit
def add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HAS_DELTA: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """``x`` (tokens, size) += ``delta``. ``out`` is its root-mean-square norm times ``weight``."""
    at = tl.arange(0, WIDTH)
    there = at < size
    places = tl.program_id(0).to(tl.int64) * size + at
    factor = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    value = tl.load(x + places, mask=there, other=0.0)
    if HAS_DELTA:
        # Rounded like torch, so that the norm's input equals the value that later layers add to.
        value = (value.to(tl.float32) + tl.load(delta + places, mask=there, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + places, value, mask=there)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / size + eps)
    normed = wide * scale * factor
    tl.store(out + places, normed.to(value.dtype), mask=there)


@triton.jit
def silu_and_mul(gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr, EARLY: tl.constexpr) -> None:
    """``gate_up`` (tokens, 2 * size) -> silu of the first half times the second half."""
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = at < size
    gate = tl.load(gate_up + token * 2 * size + at, mask=there, other=0.0)
    up = tl.load(gate_up + token * 2 * size + size + at, mask=there, other=0.0)
    wide = gate.to(tl.float32)
    product = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + token * size + at, product.to(gate.dtype), mask=there)


@triton.jit
def round_row(
    x: tl.tensor, rounded: tl.tensor, scales: tl.tensor, size: tl.tensor, largest: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """``rounded`` = ``x`` (tokens, size) scaled so that a row's largest value is ``largest``. ``scales`` reverse it.

    NaN stays NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / largest
    tl.store(scales + token, scale)
    narrow = tl.clamp(value / scale, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(rounded + token * size + at, narrow.to(rounded.dtype.element_ty), mask=at < size)


@triton.jit
def _as_stored(x: tl.tensor, factor: tl.tensor, pool: tl.tensor) -> tl.tensor:
    """Convert ``x`` to the dtype of ``pool``. fp8 has no infinity, so values above 448, its largest, become 448."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * factor, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool.dtype.element_ty)


@triton.jit
def rotate_and_write(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_factor: tl.tensor,
    value_factor: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    half: tl.tensor,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalize and rotate HEADS rows of a token's ``qkv`` (tokens, rows, 2 * half), and write them; values unchanged.

    ``cos`` and ``sin`` are (tokens, half), ``weight`` (num_heads + num_kv_heads, 2 * half). Values written to fp8 pools
    are multiplied by the factors.
    """
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    rows = num_heads + 2 * num_kv_heads
    row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    there = (row < rows) & (column < half)
    turned = there & (row < num_heads + num_kv_heads)
    source = qkv + (token * rows + row) * 2 * half + column
    left = tl.load(source, mask=there, other=0.0)
    right = tl.load(source + half, mask=there, other=0.0)
    a, b = left.to(tl.float32), right.to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)
        part = weight + row * 2 * half + column
        a = a * scale[:, None] * tl.load(part, mask=turned, other=0.0).to(tl.float32)
        b = b * scale[:, None] * tl.load(part + half, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + column, mask=column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + column, mask=column < half, other=0.0).to(tl.float32)
    out_left, out_right = (a * c - b * s).to(left.dtype), (b * c + a * s).to(left.dtype)
    is_query = there & (row < num_heads)
    target = q + (token * num_heads + row) * 2 * half + column
    tl.store(target, out_left, mask=is_query)
    tl.store(target + half, out_right, mask=is_query)
    slot = tl.load(slots + token)
    is_key = turned & (row >= num_heads)
    target = keys + (slot * num_kv_heads + row - num_heads) * 2 * half + column
    tl.store(target, _as_stored(out_left, key_factor, keys), mask=is_key)
    tl.store(target + half, _as_stored(out_right, key_factor, keys), mask=is_key)
    is_value = there & (row >= num_heads + num_kv_heads)
    target = values + (slot * num_kv_heads + row - num_heads - num_kv_heads) * 2 * half + column
    tl.store(target, _as_stored(left, value_factor, values), mask=is_value)
    tl.store(target + half, _as_stored(right, value_factor, values), mask=is_value)

"""Triton kernels for experts: products with a different weight for each row, and the sum of a token's experts."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(
    ends: tl.tensor, groups: tl.tensor, tile: tl.tensor, GROUPS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find the group of ``tile``, if groups are cut into tiles of ROWS. Returns (group, first place, end of the group).

    Group g has the places from ``ends[g - 1]`` to ``ends[g]``. After the last tile the group is ``groups``.
    """
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < groups, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    found = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    found = tl.minimum(found, groups)
    is_found = group == found
    first = tl.sum(tl.where(is_found, start + (tile - tile_ends + tiles) * ROWS, 0), 0)
    return found, first, tl.sum(tl.where(is_found, end, 0), 0)


@triton.jit
def product_by_expert(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    FAN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """``out[p]`` (outputs,) = ``weight[e]`` (outputs, inputs) times ``x[p // FAN]`` for the pairs p of each expert e.

    ``order`` has the pairs sorted by expert, ``ends`` (experts,) the end of each expert's pairs.
    """
    expert, first, last = find_tile(ends, experts, tl.program_id(0), EXPERTS, ROWS)
    if expert < experts:
        place = first + tl.arange(0, ROWS)
        pair = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        rows = x + (pair // FAN)[:, None] * inputs + depth[None, :]
        columns = weight + (expert.to(tl.int64) * outputs + column)[:, None] * inputs + depth[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for done in range(0, inputs, DEPTH):
            left = (depth < inputs - done)[None, :]
            a = tl.load(rows + done, mask=(place < last)[:, None] & left, other=0.0)
            b = tl.load(columns + done, mask=(column < outputs)[:, None] & left, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        target = out + pair[:, None] * outputs + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(place < last)[:, None] & (column < outputs)[None, :])


@triton.jit
def add_weighted(
    products: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    FAN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``out`` (tokens, size) = the sum of FAN neighbouring rows of ``products``, each multiplied by its ``weights``."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = at < size
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for chosen in range(FAN):
        row = token * FAN + chosen
        part = tl.load(products + row * size + at, mask=there, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row).to(tl.float32)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=there)

"""Triton kernels for LoRA adapters: both products of all rows of a step, for any adapters."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from raylm.models.gpu.expert_kernels import find_tile


@triton.jit(do_not_specialize=["tokens"])
def low_rank_down(
    x: tl.tensor,
    narrow: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    groups: tl.tensor,
    row_size: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """``narrow`` (SPLIT, tokens, PARTS * RANK) = the products of ``down`` with the rows ``order``, in that order.

    ``table`` (groups, row_size) has the addresses of ``down`` (PARTS * rank, inputs) and ``up``, and the rank, which is
    0 if a group does not change the layer. ``ends`` (groups,) is the end of each group's rows. A program sums every
    SPLIT-th piece of the inputs.
    """
    group, first, last = find_tile(ends, groups, tl.program_id(0), GROUPS, ROWS)
    if group < groups:
        entry = table + group * row_size
        rank = tl.load(entry + 2)
        begin = tl.program_id(1) * COLUMNS
        if begin < PARTS * rank:
            down = tl.multiple_of(tl.load(entry).to(x.dtype), 16)
            place = first + tl.arange(0, ROWS)
            token = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
            column = begin + tl.arange(0, COLUMNS)
            depth = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
            rows = x + token[:, None] * inputs + depth[None, :]
            columns = down + column[:, None] * inputs + depth[None, :]
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for done in range(0, inputs - tl.program_id(2) * DEPTH, DEPTH * SPLIT):
                left = (depth < inputs - done)[None, :]
                a = tl.load(rows + done, mask=(place < last)[:, None] & left, other=0.0)
                b = tl.load(columns + done, mask=(column < PARTS * rank)[:, None] & left, other=0.0)
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
            target = narrow + (tl.program_id(2) * tokens + place[:, None]) * (PARTS * RANK) + column[None, :]
            tl.store(target, total, mask=(place < last)[:, None] & (column < PARTS * rank)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def low_rank_up(
    narrow: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    groups: tl.tensor,
    row_size: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """``out`` (tokens, outputs) += the products of ``narrow`` with ``up`` (outputs, rank), in the rows ``order``.

    Columns from ``second`` and ``third`` on belong to the second and third part, which use the second and third
    ``rank`` columns of ``narrow``.
    """
    group, first, last = find_tile(ends, groups, tl.program_id(0), GROUPS, ROWS)
    if group < groups:
        entry = table + group * row_size
        rank = tl.load(entry + 2)
        if rank > 0:
            up = tl.multiple_of(tl.load(entry + 1).to(out.dtype), 16)
            block = tl.program_id(1)
            before_third = tl.cdiv(second, COLUMNS) + tl.cdiv(third - second, COLUMNS)
            in_second, in_third = block >= tl.cdiv(second, COLUMNS), block >= before_third
            begin = tl.where(in_third, third, tl.where(in_second, second, 0))
            end = tl.where(in_third, outputs, tl.where(in_second, third, second))
            skipped = tl.where(in_third, before_third, tl.where(in_second, tl.cdiv(second, COLUMNS), 0))
            part = in_second.to(tl.int32) + in_third.to(tl.int32)
            column = begin + (block - skipped) * COLUMNS + tl.arange(0, COLUMNS)
            place = first + tl.arange(0, ROWS)
            depth = tl.arange(0, DEPTH)
            row = narrow + place[:, None] * (PARTS * RANK) + part * rank + depth[None, :]
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for done in range(0, rank, DEPTH):
                left = (depth < rank - done)[None, :]
                a = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
                for split in tl.static_range(SPLIT):
                    piece = row + split * tokens * (PARTS * RANK) + done
                    a += tl.load(piece, mask=(place < last)[:, None] & left, other=0.0)
                at = up + column.to(tl.int64)[:, None] * rank + done + depth[None, :]
                b = tl.load(at, mask=(column < end)[:, None] & left, other=0.0)
                total = tl.dot(a.to(b.dtype), tl.trans(b), total, input_precision="ieee")
            token = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
            target = out + token[:, None] * outputs + column[None, :]
            mask = (place < last)[:, None] & (column < end)[None, :]
            total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, total.to(out.dtype.element_ty), mask=mask)

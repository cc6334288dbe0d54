"""A Triton kernel for products with 4-bit weights, which it converts to floats in registers."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def int4_product(
    x: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    group: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """``out`` (tokens, outputs) = ``x`` (tokens, inputs) times (integer - zero) * scale, plus ``bias``.

    ``packed`` (outputs, inputs / 2): each HALF bytes have the integers of 2 * HALF inputs, the first half in the low
    bits. ``scales`` float32 and ``zeros`` uint8 are (inputs / group, outputs). ``group`` is a multiple of 2 * HALF.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    half = tl.arange(0, HALF)
    is_row, is_column = row < tokens, column < outputs
    left = x + row.to(tl.int64)[:, None] * inputs + half[None, :]
    codes = packed + column.to(tl.int64)[:, None] * (inputs // 2) + half[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, inputs, 2 * HALF):
        place = (done // group) * outputs + column
        scale = tl.load(scales + place, mask=is_column, other=0.0)[:, None]
        zero = tl.load(zeros + place, mask=is_column, other=0).to(tl.float32)[:, None]
        code = tl.load(codes + done // 2, mask=is_column[:, None], other=0)
        low = (((code & 15).to(tl.float32) - zero) * scale).to(x.dtype.element_ty)
        high = (((code >> 4).to(tl.float32) - zero) * scale).to(x.dtype.element_ty)
        a = tl.load(left + done, mask=is_row[:, None], other=0.0)
        b = tl.load(left + done + HALF, mask=is_row[:, None], other=0.0)
        total = tl.dot(a, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(b, tl.trans(high), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

"""A Triton kernel for products of fp8 numbers with scales for runs of inputs."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def fp8_product(
    x: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    granule: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """``out`` (tokens, outputs) = ``x`` (tokens, inputs) times ``weight`` (outputs, inputs), both fp8, plus ``bias``.

    ``row_scales`` (tokens, inputs / RUN) and ``scales`` (outputs / granule, inputs / RUN) float32 reverse the rounding.
    ``inputs`` is a multiple of RUN.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    run = tl.arange(0, RUN)
    is_row, is_column = row < tokens, column < outputs
    runs = inputs // RUN
    left = x + row.to(tl.int64)[:, None] * inputs + run[None, :]
    right = weight + column.to(tl.int64)[:, None] * inputs + run[None, :]
    left_scales, right_scales = row_scales + row.to(tl.int64) * runs, scales + (column // granule) * runs
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for at in range(runs):
        a = tl.load(left + at * RUN, mask=is_row[:, None], other=0.0)
        b = tl.load(right + at * RUN, mask=is_column[:, None], other=0.0)
        of_rows = tl.load(left_scales + at, mask=is_row, other=0.0)
        of_columns = tl.load(right_scales + at, mask=is_column, other=0.0)
        total += tl.dot(a, tl.trans(b)) * of_rows[:, None] * of_columns[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

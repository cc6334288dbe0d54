"""A Triton kernel for the product of one row: it reads each weight once, so only memory bounds it."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from raylm.models.gpu.dependent_launch import wait_for_previous


@triton.jit
def multiply_row(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """``out`` (outputs,) = ``weight`` (outputs, inputs) times ``x`` (inputs,), plus ``bias``. Sums are float32.

    A program computes ROWS outputs. It loads weights before it waits for ``x``, and those of the next DEPTH inputs
    before it multiplies.
    """
    row, depth = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    is_row = row < outputs
    source = weight + row.to(tl.int64)[:, None] * inputs + depth[None, :]
    ahead = tl.load(source, mask=is_row[:, None] & (depth < inputs)[None, :], other=0.0)
    wait_for_previous(EARLY)
    total = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for done in range(0, inputs, DEPTH):
        current = ahead
        left = inputs - done - DEPTH
        ahead = tl.load(source + done + DEPTH, mask=is_row[:, None] & (depth < left)[None, :], other=0.0)
        values = tl.load(x + done + depth, mask=depth < inputs - done, other=0.0).to(tl.float32)
        total += current.to(tl.float32) * values[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)

"""Rounding of rows to 8-bit floats on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from raylm.models.gpu import kernels

_FP8 = torch.float8_e4m3fn


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (tokens, in) in fp8, and what that is to be multiplied by, (tokens, 1) float32."""
    tokens, size = x.shape
    rounded, scales = torch.empty_like(x, dtype=_FP8), x.new_empty(tokens, 1, dtype=torch.float32)
    width = triton.next_power_of_2(size)
    kernels.round_row[tokens,](
        x.contiguous(), rounded, scales, size, torch.finfo(_FP8).max,
        WIDTH=width, num_warps=max(1, min(16, width // 512)),
    )  # fmt: skip
    return rounded, scales

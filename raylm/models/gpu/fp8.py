"""fp8 on a GPU: rounding in one launch, and products of weights with scales for blocks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from raylm.models.gpu import fp8_kernels, kernels

_FP8 = torch.float8_e4m3fn
_RUN = 128  # inputs that are rounded with one scale
_FEW = 64  # rows up to which tiles are small


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (tokens, in) in fp8, and its scales (tokens, 1) float32."""
    tokens, size = x.shape
    rounded, scales = torch.empty_like(x, dtype=_FP8), x.new_empty(tokens, 1, dtype=torch.float32)
    width = triton.next_power_of_2(size)
    kernels.round_row[tokens,](
        x.contiguous(), rounded, scales, size, torch.finfo(_FP8).max,
        WIDTH=width, num_warps=max(1, min(16, width // 512)),
    )  # fmt: skip
    return rounded, scales


class Fp8BlocksLinear:
    """``x`` (tokens, in) -> (tokens, out), in the dtype of ``x``.

    Runs of 128 inputs of a token are rounded with their own scale, so that no row depends on other rows. Tensor cores
    sum within a run; the sum over runs is float32. ``scales`` is (out / granule, in / 128).
    """

    def __init__(self, weight: Tensor, scales: Tensor, granule: int, bias: Tensor | None) -> None:
        self._weight, self._scales, self._granule, self._bias = weight, scales.contiguous(), granule, bias

    def __call__(self, x: Tensor) -> Tensor:
        tokens, (outputs, inputs) = len(x), self._weight.shape
        out = x.new_empty(tokens, outputs)
        if not tokens:
            return out
        rounded, row_scales = round_rows(x.reshape(-1, _RUN))
        rows, columns, warps, stages = (16, 32, 4, 4) if tokens <= _FEW else (64, 128, 8, 3)
        fp8_kernels.fp8_product[triton.cdiv(tokens, rows), triton.cdiv(outputs, columns)](
            rounded, row_scales, self._weight, self._scales, self._bias, out, tokens, inputs, outputs, self._granule,
            HAS_BIAS=self._bias is not None, ROWS=rows, COLUMNS=columns, RUN=_RUN, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out

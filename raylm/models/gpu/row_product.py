"""Linear layers with plain weights on a GPU: a kernel of their own for one row, torch's product for more rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from raylm.models.gpu import row_product_kernels
from raylm.models.gpu.dependent_launch import early


@dataclass(frozen=True, slots=True)
class RowTile:
    """The work of one program: ``rows`` outputs, from ``depth`` inputs at a time."""

    rows: int
    depth: int
    warps: int


TILE = RowTile(1, 1024, 4)


class RowLinear:
    """``x`` (tokens, in) -> (tokens, out), in the dtype of ``x``. Sums are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) != 1 or x.dtype == torch.float32:
            return F.linear(x, self._weight, self._bias)
        return multiply_row(x.contiguous(), self._weight, self._bias, TILE)


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowTile) -> Tensor:
    """``x`` (1, in) times ``weight`` (out, in), plus ``bias``."""
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs)
    row_product_kernels.multiply_row[triton.cdiv(outputs, tile.rows),](
        x, weight, bias, out, inputs, outputs,
        HAS_BIAS=bias is not None, ROWS=tile.rows, DEPTH=tile.depth, num_warps=tile.warps, **early(x.device),
    )  # fmt: skip
    return out

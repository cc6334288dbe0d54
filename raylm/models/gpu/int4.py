"""Linear layers with 4-bit weights on a GPU, for GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.gpu import int4_kernels
from raylm.native import Int4Weight

_BLOCKS = (128, 64, 32)  # inputs that are packed together: the largest size that divides a group
_FEW = 64  # rows up to which tiles are small


class Int4Linear:
    """``x`` (tokens, in) -> (tokens, out), in the dtype of ``x``, with sums in float32."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.values.shape
        self._group = self._inputs // weight.scales.shape[1]
        block = next((size for size in _BLOCKS if self._group % size == 0), None)
        if block is None:
            served = "a multiple of 32 inputs share a scale"
            raise ConfigError(f"model: 4-bit weights are served on a GPU where {served}, not {self._group}.")
        self._half = block // 2
        low, high = weight.values.view(self._outputs, -1, 2, self._half).unbind(2)
        self._packed = (low | (high << 4)).view(self._outputs, -1)
        self._scales = weight.scales.float().t().contiguous()
        zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
        self._zeros, self._bias = zeros.t().to(torch.uint8).contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        tokens = len(x)
        out = x.new_empty(tokens, self._outputs)
        rows, columns = (16, 64) if tokens <= _FEW else (64, 64)
        if tokens:
            int4_kernels.int4_product[triton.cdiv(tokens, rows), triton.cdiv(self._outputs, columns)](
                x.contiguous(), self._packed, self._scales, self._zeros, self._bias, out,
                tokens, self._inputs, self._outputs, self._group,
                HAS_BIAS=self._bias is not None, HALF=self._half, ROWS=rows, COLUMNS=columns, num_stages=3,
            )  # fmt: skip
        return out

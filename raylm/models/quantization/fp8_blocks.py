"""Linear layers with fp8 weights and a scale for each block of a weight, as in DeepSeek-V3 and Qwen3's FP8 models.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. On GPUs inputs are rounded too; each run of 128 of a
token has its own scale. CPUs cannot multiply fp8, so weights are converted to the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.models.linear import KernelFactory, Linear, LinearKernel, WeightFormat
from raylm.models.quantization.fp8 import FP8

BLOCK = 128  # outputs, and inputs, that share one scale

# Kernels, constructed from ``weight`` (out, in) fp8, ``scales`` (out / granule, in / BLOCK) float32, the granule, and a
# bias.
FP8_BLOCK_LINEARS = Family[Callable[[Tensor, Tensor, int, Tensor | None], LinearKernel]]({
    "cuda": "raylm.models.gpu.fp8:Fp8BlocksLinear",
})  # fmt: skip


class Fp8Blocks(WeightFormat):
    """``weight`` (out, in) fp8 and ``weight_scale_inv`` (out / 128, in / 128) float32, the factors of its blocks.

    The last block of outputs may be smaller.
    """

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if inputs % BLOCK:
            raise ValueError(f"fp8 blocks need inputs that are a multiple of {BLOCK}, not {inputs}")
        scales = torch.empty((-(-rows // BLOCK), inputs // BLOCK))
        return {"weight": torch.empty((rows, inputs), dtype=FP8), "weight_scale_inv": scales}

    def freeze(self, layer: Linear, kernels: KernelFactory) -> tuple[LinearKernel, int]:
        for name, stored in layer.stored.items():
            scales = stored["weight_scale_inv"]
            if not bool((scales.isfinite() & (scales > 0)).all()):
                raise ConfigError(f"model: the scales of {name} must be positive.")
        weight = torch.cat([stored["weight"] for stored in layer.stored.values()])
        # Outputs that share a scale, such that no block overlaps two parts.
        granule = math.gcd(BLOCK, *list(layer.parts.values())[:-1])
        scales = torch.cat([
            stored["weight_scale_inv"].repeat_interleave(BLOCK // granule, 0)[: -(-rows // granule)]
            for rows, stored in zip(layer.parts.values(), layer.stored.values(), strict=True)
        ])  # fmt: skip
        bias = None if layer.bias is None else layer.bias.data
        if weight.device.type in FP8_BLOCK_LINEARS:
            kernel = FP8_BLOCK_LINEARS[weight.device.type](weight, scales, granule, bias)
            return kernel, weight.nbytes + scales.nbytes
        floats = as_floats(weight, scales, granule).to(layer.dtype)
        return kernels(floats, bias), floats.nbytes


def as_floats(weight: Tensor, scales: Tensor, granule: int) -> Tensor:
    """The float32 values of ``weight`` (out, in), with a scale for each ``granule`` of outputs."""
    by_output = scales.repeat_interleave(granule, 0)[: len(weight)]
    return weight.float() * by_output.repeat_interleave(BLOCK, 1)

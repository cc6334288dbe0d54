"""Linear layers with fp8 weights in compressed-tensors' format, multiplied by torch's scaled product.

Products use the tensor cores' fast accumulation. Its sums have fewer bits, but far more than fp8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.models.linear import KernelFactory, Linear, LinearKernel, WeightFormat

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_MULTIPLE = 16  # the scaled product of a GPU needs multiples of this
_CAPABILITY = (8, 9)


class Fp8Tensors(WeightFormat):
    """compressed-tensors float-quantized: ``weight`` (out, in) fp8, ``weight_scale`` and ``input_scale`` (1,)."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if rows % _MULTIPLE or inputs % _MULTIPLE:
            raise ValueError(f"fp8 weights need outputs and inputs that are multiples of 16, not {rows} and {inputs}")
        weight = torch.empty((rows, inputs), dtype=FP8)
        return {"weight": weight, "weight_scale": torch.empty(1), "input_scale": torch.empty(1)}

    def freeze(self, layer: Linear, kernels: KernelFactory) -> tuple[LinearKernel, int]:
        parts = [Fp8Part(**stored) for stored in layer.stored.values()]
        for name, part in zip(layer.parts, parts, strict=True):
            scales = torch.cat([part.weight_scale, part.input_scale])
            if not bool((scales.isfinite() & (scales > 0)).all()):
                raise ConfigError(f"model: the scales of {name} are {scales.tolist()}; they must be positive.")
        kernel = Fp8Linear(parts, None if layer.bias is None else layer.bias.data)
        return kernel, sum(part.weight.nbytes for part in parts)


@dataclass(frozen=True)
class Fp8Part:
    """One checkpoint module: weights are ``weight`` times ``weight_scale``, inputs are rounded by ``input_scale``."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor


class Fp8Linear:
    """``x`` (tokens, in) -> (tokens, out of all parts). Parts with equal input scales share the rounded inputs.

    The input scales are fixed by calibration, so that no row depends on other rows.
    """

    def __init__(self, parts: list[Fp8Part], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias
        self._alike = all(torch.equal(part.input_scale, parts[0].input_scale) for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        shared = round_inputs(x, self._parts[0].input_scale) if self._alike else None
        products = []
        for part in self._parts:
            rounded = round_inputs(x, part.input_scale) if shared is None else shared
            a, b = part.input_scale, part.weight_scale
            products.append(
                torch._scaled_mm(rounded, part.weight.t(), scale_a=a, scale_b=b, out_dtype=x.dtype, use_fast_accum=True)
            )
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self._bias is None else out + self._bias


@dataclass(frozen=True, eq=False)
class Fp8Rows(WeightFormat):
    """compressed-tensors float-quantized, with inputs rounded by token.

    ``weight`` is (out, in) fp8, ``weight_scale`` (out, 1), or (1,) if it is not ``by_channel``.
    """

    by_channel: bool

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        weight = Fp8Tensors().tensors(rows, inputs)["weight"]
        return {"weight": weight, "weight_scale": torch.empty((rows, 1) if self.by_channel else 1)}

    def freeze(self, layer: Linear, kernels: KernelFactory) -> tuple[LinearKernel, int]:
        scales = []
        for (name, rows), stored in zip(layer.parts.items(), layer.stored.values(), strict=True):
            scale = stored["weight_scale"]
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise ConfigError(f"model: the scales of {name} must be positive.")
            scales.append(scale.reshape(-1).expand(rows))
        weight = torch.cat([stored["weight"] for stored in layer.stored.values()])
        bias = None if layer.bias is None else layer.bias.data
        return Fp8RowsLinear(weight, torch.cat(scales), bias), weight.nbytes


class Fp8RowsLinear:
    """``x`` (tokens, in) -> (tokens, out). Each row's scale is its largest value, so that no row depends on other rows.

    In float16 the product is first rounded to bfloat16, the only narrow dtype of scaled products by row.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales, self._bias = weight, scales[None].contiguous(), bias
        self._round = _select_rounding(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self._weight))
        rounded, scales = self._round(x)
        dtype = torch.bfloat16 if x.dtype == torch.float16 else x.dtype
        options = {"scale_a": scales, "scale_b": self._scales, "out_dtype": dtype, "use_fast_accum": True}
        out = torch._scaled_mm(rounded, self._weight.t(), **options).to(x.dtype)  # type: ignore[arg-type]
        return out if self._bias is None else out + self._bias


# By device. On other devices torch rounds, in several launches.
ROUND_ROWS = Family[Callable[[Tensor], tuple[Tensor, Tensor]]]({
    "cuda": "raylm.models.gpu.fp8:round_rows",
})  # fmt: skip


def _select_rounding(device: torch.device) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    try:
        return ROUND_ROWS.get(device.type, round_rows)
    except ModuleNotFoundError as error:
        logger.warning("Inputs are rounded to fp8 by torch, and slower: %s", error)
        return round_rows


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (tokens, in) in fp8, and its scales (tokens, 1) float32."""
    scales = x.float().abs().amax(1, keepdim=True).clamp_(min=1e-12) / _LARGEST
    return round_inputs(x, scales), scales


def round_inputs(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` divided by ``scale`` in fp8. Values beyond its range become its largest value."""
    return (x.float() / scale).clamp_(-_LARGEST, _LARGEST).to(FP8)


def check_fp8(what: str, device: torch.device) -> None:
    """Raise ConfigError for a device that cannot multiply fp8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ConfigError(
            f"{what} served on NVIDIA GPUs of compute capability 8.9 (Ada, Hopper) or higher only; this worker's "
            f"device is {device}."
        )

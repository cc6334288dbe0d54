"""Linear layers of 8-bit floats, compressed-tensors' per-tensor W8A8, multiplied by torch's scaled product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.linear import KernelFactory, Linear, LinearKernel, WeightFormat

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_MULTIPLE = 16  # what the scaled product of a GPU asks of both sides of a weight
_CAPABILITY = (8, 9)


class Fp8Tensors(WeightFormat):
    """compressed-tensors float-quantized: ``weight`` (out, in) fp8, ``weight_scale`` and ``input_scale`` (1,)."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if rows % _MULTIPLE or inputs % _MULTIPLE:
            raise ValueError(f"fp8 weights are served where both sides are a multiple of 16, not {rows} and {inputs}")
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
    """One checkpoint module: weights are ``weight`` times ``weight_scale``, inputs multiples of ``input_scale``."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor


class Fp8Linear:
    """``x`` (tokens, in) -> (tokens, out of all parts); parts that were calibrated alike share the rounded inputs.

    Calibration fixed the scale of the inputs, so that no row depends on its neighbours.
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
            products.append(torch._scaled_mm(rounded, part.weight.t(), scale_a=a, scale_b=b, out_dtype=x.dtype))
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self._bias is None else out + self._bias


def round_inputs(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` over ``scale`` in fp8; what lies beyond its range becomes its largest value."""
    return (x.float() / scale).clamp_(-_LARGEST, _LARGEST).to(FP8)


def check_fp8(what: str, device: torch.device) -> None:
    """Refuse a device that does not multiply fp8: one that is no GPU, or too old."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ConfigError(
            f"{what} served on NVIDIA GPUs of compute capability 8.9 (Ada, Hopper) or higher only; this worker's "
            f"device is {device}."
        )

"""Rounds float weights to 8 or 4 bits as they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.models.linear import Linear, StackedFormat
from raylm.native import Int8Weight, Weight, kernels, round_int4

_GROUPS = (64, 32)  # a ninth less error than 128 (benchmarks/model/quantization_choices.py); 32 reads twice the scales


class RoundedInt8(StackedFormat):
    """Float weights rounded to 8 bits, symmetric, with one scale for each output."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if inputs % 4:
            raise ValueError(f"8-bit weights need inputs that are a multiple of 4, not {inputs}")
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        return round_int8(layer.weight.data)


class RoundedInt4(StackedFormat):
    """Float weights rounded to 4 bits, each group of inputs with a scale and a zero."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        group_of(inputs)
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        return round_int4(kernels(), layer.weight.data, group_of(layer.in_features))


def group_of(inputs: int) -> int:
    """The size of the groups that so many inputs are divided into.

    Raises:
        ValueError: there is none.
    """
    for group in _GROUPS:
        if inputs % group == 0:
            return group
    raise ValueError(f"4-bit weights need inputs that are a multiple of {_GROUPS[-1]}, not {inputs}")


def round_int8(weight: Tensor) -> Int8Weight:
    """(out, in) to the nearest of 255 steps, of which the largest is the output's largest weight."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_(min=1e-12) / 127
    return Int8Weight((wide / scales[:, None]).round_().to(torch.int8), scales)

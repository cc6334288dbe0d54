"""Rounds float weights to 8 or 4 bits as they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.models.linear import Linear, WeightFormat
from raylm.native import Int4Weight, Int8Weight, Weight

_GROUPS = (64, 32)
_CLIPS = tuple(1 - 0.04 * step for step in range(11))
_LEVELS = 15
_ROWS_AT_ONCE = 4096  # so that the search of a large head stays small beside it


class RoundedInt8(WeightFormat):
    """Float weights rounded to 8 bits, symmetric, with one scale for each output."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if inputs % 4:
            raise ValueError(f"8-bit weights need inputs that are a multiple of 4, not {inputs}")
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        return round_int8(layer.weight.data)


class RoundedInt4(WeightFormat):
    """Float weights rounded to 4 bits, each group of inputs with a scale and a zero."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        group_of(inputs)
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        return round_int4(layer.weight.data, group_of(layer.in_features))


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


def round_int4(weight: Tensor, group: int) -> Int4Weight:
    """(out, in) to the nearest of 16 steps between the bounds of each group of ``group`` inputs.

    The bounds are the group's least and largest weight, drawn in by the share that makes the squared error least.
    """
    rounded = [_round_int4(rows, group) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    values, scales, zeros = (torch.cat(column) for column in zip(*rounded, strict=True))
    return Int4Weight(values, scales, zeros)


def _round_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = weight.float().view(len(weight), -1, group)
    low, high = wide.amin(2).clamp_(max=0), wide.amax(2).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    for clip in _CLIPS:
        scale = (clip * (high - low) / _LEVELS).clamp_(min=1e-12)
        zero = (-clip * low / scale).round_()
        wrong = (_steps(wide, scale, zero).sub_(zero[..., None]).mul_(scale[..., None]).sub_(wide)).square_().sum(2)
        better = wrong < best
        best = torch.where(better, wrong, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return _steps(wide, scales, zeros).to(torch.uint8).flatten(1), scales, zeros


def _steps(wide: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (wide / scales[..., None] + zeros[..., None]).round_().clamp_(0, _LEVELS)

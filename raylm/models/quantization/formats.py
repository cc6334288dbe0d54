"""Weight formats of 8-bit and 4-bit integers: stored in checkpoints, or rounded from floats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.linear import Linear, WeightFormat
from raylm.native import Int4Weight, Int8Weight, Weight, kernels, round_int4

_MIDDLE = 8
# The position of each of 8 columns' 4 bits in an AWQ word, from the low end; see AutoAWQ's GEMM layer.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_INT8_GROUPS = (64, 32)
_INT4_GROUP = 32  # 64 needs half the scales and loses several times as much quality


class RoundedInt8(WeightFormat):
    """Floats rounded to 8 bits, symmetric, with one scale for each group of 64 or 32 inputs of an output.

    Where the inputs are no multiple of 32, an output has one scale.
    """

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        if inputs % 4:
            raise ValueError(f"8-bit weights need inputs that are a multiple of 4, not {inputs}")
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        groups = [group for group in _INT8_GROUPS if layer.in_features % group == 0]
        return round_int8(layer.weight.data, groups[0] if groups else None)


class Int8Channels(RoundedInt8):
    """compressed-tensors int-quantized: ``weight`` (out, in) int8 and ``weight_scale`` (out, 1)."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        super().tensors(rows, inputs)
        return {"weight": torch.empty((rows, inputs), dtype=torch.int8), "weight_scale": torch.empty((rows, 1))}

    def weight(self, layer: Linear) -> Weight:
        parts = list(layer.stored.values())
        scales = torch.cat([part["weight_scale"] for part in parts])
        return Int8Weight(torch.cat([part["weight"] for part in parts]), scales.squeeze(1))


@dataclass(frozen=True, eq=False)
class GroupedInt4(WeightFormat):
    """4-bit weights with a scale and a zero for each ``group`` of inputs. None is one group for all."""

    group: int | None

    def groups(self, inputs: int) -> int:
        size = self.group or inputs
        if inputs % size or size % 8:
            raise ValueError(f"4-bit weights need groups of a multiple of 8 that divide {inputs} inputs")
        return inputs // size

    def weight(self, layer: Linear) -> Weight:
        parts = [self.part(name, stored) for name, stored in layer.stored.items()]
        values, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
        return Int4Weight(values, scales, None if bool((zeros == _MIDDLE).all()) else zeros)

    @abstractmethod
    def part(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Values (out, in) uint8, scales (out, groups), zeros (out, groups) of one part."""


@dataclass(frozen=True, eq=False)
class PackQuantized(GroupedInt4):
    """compressed-tensors pack-quantized, 4 bits: a word has 8 neighbours along the input, from its low end on."""

    symmetric: bool

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        groups = self.groups(inputs)
        found = {
            "weight_packed": torch.empty((rows, inputs // 8), dtype=torch.int32),
            "weight_scale": torch.empty((rows, groups)),
            "weight_shape": torch.empty(2, dtype=torch.int64),
        }
        if not self.symmetric:
            found["weight_zero_point"] = torch.empty((-(-rows // 8), groups), dtype=torch.int32)
        return found

    def part(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        values, scales = unpacked(stored["weight_packed"]), stored["weight_scale"]
        shape = stored["weight_shape"].tolist()
        if shape != list(values.shape):
            wanted = list(values.shape)
            raise ConfigError(f"model: the weight_shape of {name} is {shape}, config.json requires {wanted}.")
        if self.symmetric:
            return values, scales, torch.full_like(scales, _MIDDLE)
        zeros = unpacked(stored["weight_zero_point"].T)[:, : len(values)]
        return values, scales, zeros.T.float()


@dataclass(frozen=True, eq=False)
class Gptq(GroupedInt4):
    """GPTQ, 4 bits: a word has 8 neighbours along the input. ``zero_shift`` is added to stored zeros."""

    zero_shift: int

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        return _zeros_and_scales(rows, self.groups(inputs)) | {
            "qweight": torch.empty((inputs // 8, rows), dtype=torch.int32),
            "g_idx": torch.empty(inputs, dtype=torch.int32),
        }

    def part(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, groups = len(stored["g_idx"]), len(stored["scales"])
        neighbours = torch.arange(inputs, device=stored["g_idx"].device) // (inputs // groups)
        if not torch.equal(stored["g_idx"].long(), neighbours):
            raise ConfigError(
                f"model: the g_idx of {name} orders inputs by activation (desc_act); supported: groups of neighbours."
            )
        zeros = (unpacked(stored["qzeros"]) + self.zero_shift) & 15
        return unpacked(stored["qweight"].T), stored["scales"].T, zeros.T.float()


class Awq(GroupedInt4):
    """AWQ, 4 bits, gemm layout: a word has 8 neighbours along the output, in the order of its kernel."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        weight = torch.empty((inputs, rows // 8), dtype=torch.int32)
        return _zeros_and_scales(rows, self.groups(inputs)) | {"qweight": weight}

    def part(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        words = (unpacked(stored[kind]) for kind in ("qweight", "qzeros"))
        places = torch.tensor(_AWQ_PLACES, device=stored["qweight"].device)
        values, zeros = (each.view(len(each), -1, 8).index_select(2, places).flatten(1) for each in words)
        return values.T, stored["scales"].T, zeros.T.float()


class RoundedInt4(WeightFormat):
    """Floats rounded to 4 bits. Each group of inputs has a scale and a zero."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        group_of(inputs)
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        return round_int4(kernels(), layer.weight.data, group_of(layer.in_features))


def group_of(inputs: int) -> int:
    """The size of groups of inputs. Raises ValueError if no size divides them."""
    if inputs % _INT4_GROUP:
        raise ValueError(f"4-bit weights need inputs that are a multiple of {_INT4_GROUP}, not {inputs}")
    return _INT4_GROUP


def round_int8(weight: Tensor, group: int | None = None) -> Int8Weight:
    """Round (out, in) to the nearest of 255 steps. The largest step is the largest weight of ``group`` inputs.

    Without ``group`` an output has one scale.
    """
    wide = weight.float().reshape(len(weight), -1, group or weight.shape[1])
    scales = wide.abs().amax(2).clamp_(min=1e-12) / 127
    values = (wide / scales[..., None]).round_().to(torch.int8).flatten(1)
    return Int8Weight(values, scales if group else scales.squeeze(1))


def unpacked(words: Tensor) -> Tensor:
    """(rows, n) words of 32 bits -> (rows, 8 n) uint8 from 0 to 15, from the low end of each word on."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _zeros_and_scales(rows: int, groups: int) -> dict[str, Tensor]:
    if rows % 8:
        raise ValueError(f"weights packed along {rows} outputs need a multiple of 8")
    return {"qzeros": torch.empty((groups, rows // 8), dtype=torch.int32), "scales": torch.empty((groups, rows))}

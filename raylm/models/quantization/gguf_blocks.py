"""Weights of GGUF files that stay quantized in memory, with exactly the values that their blocks stand for.

A block has 32 weights, or 256 for the K-quants. Each type becomes integers of 4 or 8 bits, with a float32 scale, and
maybe an offset, for each group of 16 or 32 inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.models.checkpoint_check import wrong_shape
from raylm.models.gguf_names import named_tensors
from raylm.models.linear import Linear, Quantization, WeightFormat, linear_layers
from raylm.native import Int4Weight, Int8Weight, Weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups:
    """``values * scales + offsets``, or without the last: values (out, in), scales and offsets (out, groups) float32.

    Values are uint8 from 0 to 15 with 4 ``bits``, and int8 with 8 bits.
    """

    bits: int
    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def wider(self, bits: int, groups: int) -> Groups:
        """The same with this number of bits and of groups."""
        times = groups // self.scales.shape[1]
        scales = self.scales.repeat_interleave(times, 1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)
        values = self.values.view(torch.int8) if bits == 8 else self.values
        return replace(self, bits=bits, values=values, scales=scales, offsets=offsets)


class GgufBlocks(WeightFormat):
    """A layer that is stored in blocks, of a type for each part: ``weight`` (out, bytes of a row) uint8."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = dict(kinds)

    def weight(self, layer: Linear) -> Weight:
        parts = [_READERS[self.kinds[part]](stored["weight"]) for part, stored in layer.stored.items()]
        bits, groups = max(part.bits for part in parts), max(part.scales.shape[1] for part in parts)
        parts = [part.wider(bits, groups) for part in parts]
        values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
        if set(self.kinds.values()) == {"Q4_0"}:
            return Int4Weight(values, scales)  # zeros of 8 need no offsets
        offsets = None
        if any(part.offsets is not None for part in parts):
            offsets = torch.cat([torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
        return Int4Weight(values, scales, offsets=offsets) if bits == 4 else Int8Weight(values, scales, offsets)


class KeptBlocks(Quantization):
    """Keeps the blocks of layers whose parts are all of ``_READERS``' types. The others become floats."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = named_tensors(checkpoint)
        self._checkpoint = checkpoint
        kept = {tensor.kind for tensor in self._tensors.values()} & _READERS.keys()
        self.description = f"GGUF, {', '.join(sorted(kept))}" if kept else None

    def apply(self, model: nn.Module, *, tied: bool) -> None:
        floats: dict[str, int] = {}
        for prefix, layer in linear_layers(model):
            found = {part: self._tensors.get(f"{prefix}{part}.weight") for part in layer.parts}
            kinds = {part: tensor.kind for part, tensor in found.items() if tensor is not None}
            if kinds.keys() != layer.parts.keys() or not set(kinds.values()) <= _READERS.keys():
                about = ", ".join(sorted(set(kinds.values())))
                floats[about] = floats.get(about, 0) + 1
                continue
            stored = {}
            for part, tensor in found.items():
                assert tensor is not None
                wanted = (layer.parts[part], layer.in_features)
                if tensor.shape != wanted:
                    raise wrong_shape(f"{prefix}{part}.weight", tensor.shape, wanted)
                stored[part] = {"weight": torch.empty((wanted[0], tensor.nbytes // wanted[0]), dtype=torch.uint8)}
            layer.store(GgufBlocks(kinds), stored)
        for about, count in floats.items():
            logger.info("%s: %d linear layers of the types %s are floats in memory.", self._checkpoint, count, about)


def _half(blocks: Tensor, start: int) -> Tensor:
    """(..., 1) float32 of the float16 at a place of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _split(values: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _nibbles(octets: Tensor) -> Tensor:
    """(..., n) bytes -> (..., 2 n): their lower halves, and then their upper halves."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _fifth(octets: Tensor) -> Tensor:
    """(..., 4) bytes -> (..., 32): their bits, the lowest first, times 16."""
    bits = (octets[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _groups(bits: int, values: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Groups:
    """Of values (out, blocks, a block) and scales (out, blocks, groups of a block)."""
    flat = None if offsets is None else offsets.flatten(1)
    return Groups(bits, values.flatten(1) if bits == 4 else values.to(torch.int8).flatten(1), scales.flatten(1), flat)


def _q4_0(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 18)
    scales = _half(blocks, 0)
    return _groups(4, _nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 20)
    return _groups(4, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 22)
    values = _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6])
    return _groups(8, values.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 24)
    values = _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return _groups(8, values, _half(blocks, 0), _half(blocks, 2))


def _q8_0(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 34)
    return _groups(8, blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 12) bytes -> the scales and the least values of 8 groups, each (..., 8) from 0 to 63."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    return scales, torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of 8 groups of a block, each (out, blocks, 8) float32."""
    scales, least = _sixes(blocks[..., 4:16])
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * least)


def _q4_k(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 144)
    values = _nibbles(_split(blocks[..., 16:], 4, 32)).flatten(-2)
    return _groups(4, values, *_k_scales(blocks))


def _q5_k(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 176)
    low = _split(_nibbles(_split(blocks[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _groups(8, (low | (fifth << 4)).flatten(-2), *_k_scales(blocks))


def _q6_k(rows: Tensor) -> Groups:
    blocks = _split(rows, -1, 210)
    low = _split(_nibbles(_split(blocks[..., :128], 2, 64)), 4, 32)  # (out, blocks, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).flatten(-3).to(torch.int8) - 32
    return _groups(8, values, _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8))


_READERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

"""Native linear layers, and their weights: plain or quantized, and packed for the kernels."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

import raylm.native.library as lib
from raylm.native.runtime import Kernels

_MOST_GROUP = 128
KINDS = {torch.float32: lib.FLOAT32, torch.bfloat16: lib.BFLOAT16}


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``weight[o, i] = values[o, i] * scales[o]``: values (out, in) int8, scales (out,) float32.

    With scales (out, groups), each group of inputs has a scale, as in ``Int4Weight``, and it may have ``offsets``. The
    kernels also round the inputs to 8 bits, symmetric, with one scale for each row, or one for each group of a row.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + _nbytes(self.offsets)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g]``, where g is the group of input i.

    values: (out, in) uint8, 0 to 15; scales: (out, groups) float32; zeros: (out, groups), 0 to below 16, or None if all
    zeros are 8. Groups are consecutive inputs, all of one size, a multiple of 8. Beside zeros the kernels keep 12
    significant bits of a scale, all that float16 and bfloat16 have, and 8 bits of a zero behind the point.

    With ``offsets`` (out, groups) float32, ``weight[o, i] = values[o, i] * scales[o, g] + offsets[o, g]``. Scales and
    offsets keep all their bits.

    The kernels also round the inputs to 8 bits, symmetric, with one scale for each group of a row. A group of more than
    128 inputs is divided.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that a step reads: one for each two values."""
        return self.values.numel() // 2 + self.scales.nbytes + _nbytes(self.offsets)


def _nbytes(offsets: Tensor | None) -> int:
    return 0 if offsets is None else offsets.nbytes


Weight = Tensor | Int8Weight | Int4Weight


def round_int4(native: Kernels, weight: Tensor, group: int) -> Int4Weight:
    """Round (out, in) float32 or bfloat16 to the nearest of 16 steps between the bounds of each ``group`` of inputs.

    The bounds are the group's smallest and largest weight, reduced by the share that minimizes the squared error.
    """
    rows, inputs = weight.shape
    if group % lib.LANES or inputs % group:
        raise ValueError(f"{inputs} inputs cannot be rounded in groups of {group}")
    weight, groups = weight.contiguous(), inputs // group
    values, scales, zeros = torch.empty((rows, inputs), dtype=torch.uint8), *torch.empty((2, rows, groups))
    native.library.raylm_round_int4(
        native.team.handle, KINDS[weight.dtype], weight.data_ptr(), rows, inputs, group,
        values.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
    )  # fmt: skip
    return Int4Weight(values, scales, zeros)


class NativeLinear:
    """``x`` (rows, in) float32 or bfloat16 -> (rows, out) of the same dtype. Does not keep the unpacked weight.

    ``dtype`` is None if the weight is quantized.

    Raises:
        ValueError: the inputs, or a group of them, do not fill 32-bit units.
    """

    def __init__(self, native: Kernels, weight: Weight, bias: Tensor | None) -> None:
        self._native, self.struct = native, lib.LinearStruct()
        self._kept: list[Tensor] = []
        self.dtype = weight.dtype if isinstance(weight, Tensor) else None
        if isinstance(weight, Int4Weight):
            self._pack_int4(weight)
        elif isinstance(weight, Int8Weight):
            self._pack_int8(weight)
        else:
            self._pack(weight, KINDS[weight.dtype], per_unit=4 // weight.itemsize)
        self.struct.bias = self._keep(_padded(bias, self.struct.columns)) if bias is not None else None

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (n,) of a plain weight -> (n, in): the embedding of a model whose head is tied to it."""
        assert self.dtype is not None, "a quantized weight is no embedding"
        return self._words[ids // lib.LANES, :, ids % lib.LANES].view(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        struct, native, x = self.struct, self._native, x.contiguous()
        out = torch.empty((len(x), struct.columns), dtype=x.dtype)
        with native.lock:
            native.library.raylm_linear(
                native.team.handle, KINDS[x.dtype], byref(struct), x.data_ptr(), len(x), out.data_ptr(), struct.columns
            )
        return out[:, : self._out_features]

    def _pack(self, weight: Tensor, kind: int, per_unit: int) -> None:
        """Pack ``weight`` (out, in) in 32-bit units of ``per_unit`` neighbours."""
        self._out_features, units = weight.shape[0], weight[:1].nbytes // 4
        if weight[:1].nbytes % 4:
            raise ValueError(f"{weight.shape[1]} inputs are not a multiple of {per_unit}")
        groups = -(-self._out_features // lib.LANES)
        native, words = self._native, weight.contiguous().view(torch.int32)
        self._words = native.arena.empty((groups, units, lib.LANES), torch.int32)
        native.library.raylm_pack(
            native.team.handle, words.data_ptr(), self._out_features, units, self._words.data_ptr()
        )
        self.struct.kind, self.struct.columns = kind, groups * lib.LANES
        self.struct.depth, self.struct.units = units * per_unit, units
        self.struct.packed = self._keep(self._words)

    def _pack_int8(self, weight: Int8Weight) -> None:
        if weight.scales.dim() == 2:
            self._pack_int8_groups(weight)
            return
        self._pack(weight.values, lib.INT8, per_unit=4)
        sums = weight.values.sum(1, dtype=torch.int32) * 128
        self.struct.scales = self._keep(_padded(weight.scales, self.struct.columns))
        self.struct.sums = self._keep(_padded(sums, self.struct.columns, torch.int32))

    def _pack_int8_groups(self, weight: Int8Weight) -> None:
        inputs, groups = weight.values.shape[1], weight.scales.shape[1]
        if inputs % (8 * groups):
            raise ValueError(f"{inputs} inputs are no {groups} groups of a multiple of 8")
        self._pack(weight.values.view(torch.uint8) ^ 128, lib.INT8, per_unit=4)
        self.struct.group = inputs // groups
        self._keep_scales(weight.scales, weight.offsets)

    def _pack_int4(self, weight: Int4Weight) -> None:
        inputs, groups = weight.values.shape[1], weight.scales.shape[1]
        if inputs % (8 * groups):
            raise ValueError(f"{inputs} inputs are no {groups} groups of a multiple of 8")
        self._pack(_nibbles(weight.values), lib.INT4, per_unit=8)
        if weight.offsets is not None:
            self.struct.group = inputs // groups
            self._keep_scales(weight.scales, weight.offsets)
            return
        parts = 1  # inputs are rounded in the same groups; in a large group many inputs would share one scale
        while (part := inputs // groups // parts) > _MOST_GROUP and part % 16 == 0:
            parts *= 2
        self.struct.group = part
        scales = weight.scales if weight.zeros is None else _with_zeros(weight.scales, weight.zeros)
        self._keep_scales(scales.repeat_interleave(parts, 1))
        self.struct.zeros = lib.MIDDLE if weight.zeros is None else lib.SHARED

    def _keep_scales(self, scales: Tensor, offsets: Tensor | None = None) -> None:
        """Keep (out, groups) float32 in the order of the weight's streams. Offsets follow the scales of their group."""
        words = [_by_stream(values, self.struct.columns) for values in (scales, offsets) if values is not None]
        kept = self._native.arena.empty((*words[0].shape[:2], len(words), lib.LANES), torch.int32)
        self.struct.scales = self._keep(torch.stack(words, 2, out=kept))
        if offsets is not None:
            self.struct.zeros = lib.OFFSETS

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _by_stream(values: Tensor, columns: int) -> Tensor:
    """(out, groups) float32 -> (columns / 16, groups, 16) words of 32 bits, bit for bit."""
    padded = _padded(values.float(), columns).view(-1, lib.LANES, values.shape[1]).transpose(1, 2)
    return padded.contiguous().view(torch.int32)


def _nibbles(values: Tensor) -> Tensor:
    """(out, in) from 0 to 15 -> (out, in / 2) bytes. The last four of each unit of 8 are in the upper halves."""
    units = values.reshape(len(values), -1, 2, 4)
    return (units[..., 0, :] | (units[..., 1, :] << 4)).flatten(1)


def _with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """(out, groups) float32 and zeros -> words of both as float32; grouped.h describes a word."""
    kept = (scales.float().contiguous().view(torch.int32) + (1 << 11)) & ~0xFFF
    return (kept | (zeros.double() * 256).round().to(torch.int32)).view(torch.float32)


def _padded(values: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    padded = torch.zeros((size, *values.shape[1:]), dtype=dtype)
    padded[: len(values)] = values
    return padded

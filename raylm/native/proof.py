"""prove: whether the kernels of a wheel, which were compiled on another machine, work on this processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_bool, c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import raylm.native.library as lib
from raylm.native.build import NativeError

_RUNS: lib.Functions = {
    "raylm_cpu_runs": (c_bool, [*[c_void_p] * 3, c_int, c_void_p, c_void_p, c_int, c_void_p, c_int64])
}
_KINDS = {"float32": lib.FLOAT32, "bfloat16": lib.BFLOAT16, "int8": lib.INT8, "int4": lib.INT4}
_ROWS, _COLUMNS, _DEPTH, _GROUP = 13, 48, 64, 32  # more rows than a tile, and an odd number of streams


def prove(library: ctypes.CDLL, cpu: Path) -> None:
    """Compute a small product of weights of each kind. ``cpu`` is the library of cpu.cpp.

    All values are small integers, so that a right result is exact on every instruction set.

    Raises:
        NativeError: a result is wrong, or the processor refuses an instruction.
    """
    runs = lib.open_library(cpu, _RUNS).raylm_cpu_runs
    for name, kind in _KINDS.items():
        _prove_kind(runs, library, name, kind)


def _prove_kind(runs: Callable[..., bool], library: ctypes.CDLL, name: str, kind: int) -> None:
    x = np.add.outer(5 * np.arange(_ROWS), 7 * np.arange(_DEPTH)) % 23 - 11
    x[:, ::_GROUP] = 127  # the largest of each group: inputs are rounded to 8 bits in steps of 1
    weight = np.add.outer(3 * np.arange(_COLUMNS), 5 * np.arange(_DEPTH)) % 16 - 8
    words = _words(weight, kind)
    packed = np.ascontiguousarray(words.reshape(-1, lib.LANES, words.shape[1]).transpose(0, 2, 1))
    struct = lib.LinearStruct(
        kind=kind, columns=_COLUMNS, depth=_DEPTH, units=words.shape[1], packed=packed.ctypes.data
    )
    scales = np.ones((_COLUMNS, _DEPTH // _GROUP), np.float32)
    sums = (128 * weight.sum(1)).astype(np.int32)
    if kind in (lib.INT8, lib.INT4):
        struct.scales, struct.sums = scales.ctypes.data, sums.ctypes.data
        struct.group = _GROUP if kind == lib.INT4 else 0
    narrow = kind == lib.BFLOAT16
    inputs = np.ascontiguousarray(_bfloat16(x) if narrow else x.astype(np.float32))
    out = np.zeros((_ROWS, _COLUMNS), np.uint16 if narrow else np.float32)
    ran = runs(
        *(ctypes.cast(library[f"raylm_{function}"], c_void_p) for function in ("team_new", "linear", "team_free")),
        lib.BFLOAT16 if narrow else lib.FLOAT32, byref(struct), inputs.ctypes.data, _ROWS, out.ctypes.data, _COLUMNS,
    )  # fmt: skip
    if not ran:
        raise NativeError("the processor refuses one of their instructions")
    wanted = x @ weight.T
    if not np.array_equal(out, _bfloat16(wanted) if narrow else wanted):
        raise NativeError(f"their product of {name} weights is wrong")


def _bfloat16(values: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as the upper halves of float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _words(weight: NDArray[np.int64], kind: int) -> NDArray[np.uint32]:
    """(columns, depth) from -8 to 7 -> (columns, units) words of 32 bits, as linear.h and grouped.h describe them."""
    if kind == lib.FLOAT32:
        return weight.astype(np.float32).view(np.uint32)
    if kind == lib.BFLOAT16:
        return _bfloat16(weight).view(np.uint32)
    if kind == lib.INT8:
        return weight.astype(np.int8).view(np.uint32)
    units = (weight + 8).astype(np.uint8).reshape(len(weight), -1, 2, 4)
    return np.ascontiguousarray(units[:, :, 0] | units[:, :, 1] << 4).reshape(len(weight), -1).view(np.uint32)

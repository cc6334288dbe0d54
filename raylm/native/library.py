"""The C interface of the native kernels: functions, and structs, whose fields have the same names in src/."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from raylm.native.build import NativeError

FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3
LANES = 16
MIDDLE, SHARED, OFFSETS = 0, 1, 2  # Zeros of grouped.h


def _fields(kind: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, kind) for name in names)


class LinearStruct(Structure):
    _fields_ = (
        *_fields(c_int32, "kind", "columns", "depth", "units"),
        *_fields(c_void_p, "packed", "bias", "scales", "sums"),
        *_fields(c_int32, "group", "zeros"),
    )


class Batch(Structure):
    _fields_ = (
        *_fields(c_int32, "tokens", "seqs", "table_width", "block_size"),
        *_fields(c_void_p, "positions", "slots", "block_tables", "seq_lens", "starts"),
    )


class Heads(Structure):
    _fields_ = (*_fields(c_int32, "heads", "kv_heads", "head_dim", "window"), *_fields(c_float, "scale", "softcap"))


class Layer(Structure):
    _fields_ = (
        *_fields(LinearStruct, "qkv", "output", "gate_up", "down"),
        *_fields(c_void_p, "input_norm", "post_norm", "query_norm", "key_norm"),
        *_fields(c_int32, "window", "unused"),
    )


class Model(Structure):
    _fields_ = (
        *_fields(c_int32, "layers", "hidden", "inner", "max_tokens"),
        ("heads", Heads),
        *_fields(c_float, "eps", "rope_scaling"),
        *_fields(c_void_p, "inv_freq", "last_norm", "embedding"),
        ("head", LinearStruct),
        ("layer", POINTER(Layer)),
    )


class LowRankPart(Structure):
    _fields_ = (("up", LinearStruct), *_fields(c_int32, "column", "rank_at"))


class LowRankStruct(Structure):
    _fields_ = (("down", LinearStruct), *_fields(c_int32, "parts", "unused"), ("part", LowRankPart * 3))


class AdapterRunStruct(Structure):
    _fields_ = (("sites", POINTER(LowRankStruct)), *_fields(c_int32, "start", "count"))


Functions = dict[str, tuple[Any, list[Any]]]  # (result, arguments) by name

_KERNELS: Functions = {
    "raylm_team_new": (c_void_p, [c_int]),
    "raylm_team_use": (None, [c_void_p, c_int]),
    "raylm_team_free": (None, [c_void_p]),
    "raylm_pack": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "raylm_round_int4": (None, [c_void_p, c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p]),
    "raylm_linear": (None, [c_void_p, c_int, POINTER(LinearStruct), c_void_p, c_int, c_void_p, c_int64]),
    "raylm_attention": (
        None,
        [c_void_p, c_int, POINTER(Batch), POINTER(Heads), *[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    ),
    "raylm_decoder_new": (c_void_p, [c_void_p, c_int, POINTER(Model)]),
    "raylm_decoder_free": (None, [c_int, c_void_p]),
    "raylm_decoder_step": (
        None,
        [
            *[c_int, c_void_p, POINTER(Batch), c_void_p, c_void_p, POINTER(c_void_p), c_int64, c_void_p],
            *[POINTER(AdapterRunStruct), c_int],
        ],
    ),
    "raylm_decoder_logits": (None, [c_int, c_void_p, c_void_p, c_int, c_void_p, c_int64]),
    "raylm_peaks": (None, [c_void_p, c_void_p, c_int, c_int64, c_int64, c_void_p, c_void_p]),
    "raylm_decoder_seconds": (POINTER(c_double), [c_int, c_void_p]),
}


def open_library(path: Path, functions: Functions = _KERNELS, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Load a library with these ``functions``. Raises NativeError if the file is not such a library."""
    try:
        library = kind(str(path))
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from error
    return library

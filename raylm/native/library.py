"""The C interface of the native kernels: its structs (in the order of src/) and its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from raylm.native.build import NativeError

FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3
LANES = 16


class Linear(Structure):
    """A packed linear layer; see src/product.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("kind", c_int32),
        ("columns", c_int32),
        ("depth", c_int32),
        ("units", c_int32),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("offsets", c_void_p),
        ("group", c_int32),
        ("unused", c_int32),
    ]


class Batch(Structure):
    """The sequences of one step; see src/attention.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("tokens", c_int32),
        ("seqs", c_int32),
        ("table_width", c_int32),
        ("block_size", c_int32),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("seq_lens", c_void_p),
        ("starts", c_void_p),
    ]


class Heads(Structure):
    """What a layer's attention is; see src/attention.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Layer(Structure):
    """One layer of a decoder; see src/decoder.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int32),
        ("unused", c_int32),
    ]


class Model(Structure):
    """A whole decoder; see src/decoder.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("max_tokens", c_int32),
        ("heads", Heads),
        ("eps", c_float),
        ("rope_scaling", c_float),
        ("inv_freq", c_void_p),
        ("last_norm", c_void_p),
        ("embedding", c_void_p),
        ("head", Linear),
        ("layer", POINTER(Layer)),
    ]


class LowRankPart(Structure):
    """What an adapter adds to some columns of a linear layer; see src/low_rank.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("up", Linear), ("column", c_int32), ("rank_at", c_int32)]


class LowRank(Structure):
    """What an adapter adds to a linear layer; see src/low_rank.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("down", Linear),
        ("parts", c_int32),
        ("unused", c_int32),
        ("part", LowRankPart * 3),
    ]


class AdapterRun(Structure):
    """Tokens of a step that an adapter changes; see src/low_rank.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("sites", POINTER(LowRank)), ("start", c_int32), ("count", c_int32)]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "raylm_team_new": (c_void_p, [c_int]),
    "raylm_team_use": (None, [c_void_p, c_int]),
    "raylm_team_free": (None, [c_void_p]),
    "raylm_pack": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "raylm_round_int4": (None, [c_void_p, c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p]),
    "raylm_linear": (None, [c_void_p, c_int, POINTER(Linear), c_void_p, c_int, c_void_p, c_int64]),
    "raylm_attention": (
        None,
        [c_void_p, c_int, POINTER(Batch), POINTER(Heads), *[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    ),
    "raylm_decoder_new": (c_void_p, [c_void_p, c_int, POINTER(Model)]),
    "raylm_decoder_free": (None, [c_int, c_void_p]),
    "raylm_decoder_step": (
        None,
        [c_int, c_void_p, POINTER(Batch), c_void_p, POINTER(c_void_p), c_int64, c_void_p, POINTER(AdapterRun), c_int],
    ),
    "raylm_decoder_logits": (None, [c_int, c_void_p, c_void_p, c_int, c_void_p, c_int64]),
    "raylm_decoder_seconds": (POINTER(c_double), [c_int, c_void_p]),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load the compiled kernels.

    Raises:
        NativeError: the file is no such library.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from error
    return library


__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "INT4",
    "INT8",
    "LANES",
    "AdapterRun",
    "Batch",
    "Heads",
    "Layer",
    "Linear",
    "LowRank",
    "LowRankPart",
    "Model",
    "open_library",
]

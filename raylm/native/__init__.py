"""Front door of the native CPU kernels: linear layers, paged attention and the compact decoder, in C++."""

from raylm.native import library as layout
from raylm.native.build import NativeError
from raylm.native.kernels import (
    BatchTensors,
    Kernels,
    NativeAttention,
    NativeDecoder,
    NativeLinear,
    kernels,
    use_threads,
)
from raylm.native.memory import huge_empty
from raylm.native.packed_adapter import PackedAdapter
from raylm.native.packed_weight import Int4Weight, Int8Weight, Weight, round_int4

__all__ = [
    "BatchTensors",
    "Int4Weight",
    "Int8Weight",
    "Kernels",
    "NativeAttention",
    "NativeDecoder",
    "NativeError",
    "NativeLinear",
    "PackedAdapter",
    "Weight",
    "huge_empty",
    "kernels",
    "layout",
    "round_int4",
    "use_threads",
]

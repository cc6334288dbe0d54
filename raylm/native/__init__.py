"""The native CPU kernels: linear layers, paged attention and the decoder of the Llama families, in C++."""

from raylm.native import library as layout
from raylm.native.build import NativeError
from raylm.native.decoder import NativeAttention, NativeDecoder, batch_struct
from raylm.native.kernels import Kernels, kernels, use_threads
from raylm.native.linear import Int4Weight, Int8Weight, NativeLinear, Weight, round_int4
from raylm.native.memory import huge_empty
from raylm.native.packed_adapter import AdapterRun, PackedAdapter

__all__ = [
    "AdapterRun",
    "Int4Weight",
    "Int8Weight",
    "Kernels",
    "NativeAttention",
    "NativeDecoder",
    "NativeError",
    "NativeLinear",
    "PackedAdapter",
    "Weight",
    "batch_struct",
    "huge_empty",
    "kernels",
    "layout",
    "round_int4",
    "use_threads",
]

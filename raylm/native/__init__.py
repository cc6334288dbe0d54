"""Native CPU kernels in C++: linear layers, paged attention, the decoder of the Llama families, and drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.native import library as library
    from raylm.native.build import INSTRUCTION_SETS as INSTRUCTION_SETS
    from raylm.native.build import NativeError as NativeError
    from raylm.native.build import build_beside as build_beside
    from raylm.native.build import find_compiler as find_compiler
    from raylm.native.build import instruction_set as instruction_set
    from raylm.native.build import is_built as is_built
    from raylm.native.build import missing_features as missing_features
    from raylm.native.build import packaged as packaged
    from raylm.native.decoder import NativeDecoder as NativeDecoder
    from raylm.native.decoder import batch_struct as batch_struct
    from raylm.native.decoder import paged_attention as paged_attention
    from raylm.native.drafts import BatchColumns as BatchColumns
    from raylm.native.drafts import DraftColumns as DraftColumns
    from raylm.native.drafts import drafts_library as drafts_library
    from raylm.native.linear import Int4Weight as Int4Weight
    from raylm.native.linear import Int8Weight as Int8Weight
    from raylm.native.linear import NativeLinear as NativeLinear
    from raylm.native.linear import Weight as Weight
    from raylm.native.linear import round_int4 as round_int4
    from raylm.native.memory import huge_empty as huge_empty
    from raylm.native.memory import populate as populate
    from raylm.native.packed_adapter import AdapterRun as AdapterRun
    from raylm.native.packed_adapter import PackedAdapter as PackedAdapter
    from raylm.native.peaks import most_likely as most_likely
    from raylm.native.runtime import kernels as kernels
    from raylm.native.runtime import use_threads as use_threads

_MODULES = {
    "build": (  # needs no torch: `raylm serve` compiles in a child process while Ray starts
        "INSTRUCTION_SETS", "NativeError", "build_beside", "find_compiler", "instruction_set", "is_built",
        "missing_features", "packaged",
    ),
    "decoder": ("NativeDecoder", "batch_struct", "paged_attention"),
    "drafts": ("BatchColumns", "DraftColumns", "drafts_library"),
    "linear": ("Int4Weight", "Int8Weight", "NativeLinear", "Weight", "round_int4"),
    "memory": ("huge_empty", "populate"),
    "packed_adapter": ("AdapterRun", "PackedAdapter"),
    "peaks": ("most_likely",),
    "runtime": ("kernels", "use_threads"),
}  # fmt: skip

__getattr__ = front_door(__name__, _MODULES)

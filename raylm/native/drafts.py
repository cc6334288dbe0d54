"""The C interface of drafts.cpp: its functions, and its structs, whose fields have the same names in C++."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_void_p
from functools import cache

from raylm.native.build import DRAFTS, build
from raylm.native.library import Functions, open_library


class DraftColumns(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "most", "block_size", "index_bits", "ring_bits", "unused")),
        *((name, c_void_p) for name in ("tokens", "counts", "chances")),
        *((name, c_void_p) for name in ("step_rows", "computed", "step_counts", "draws", "may", "added", "order")),
    )


class BatchColumns(Structure):
    _fields_ = (
        ("stride", c_int64),
        *((name, c_void_p) for name in ("token_ids", "num_tokens", "limits", "num_blocks")),
    )


_FUNCTIONS: Functions = {
    "raylm_drafts_new": (c_void_p, [POINTER(DraftColumns)]),
    "raylm_drafts_free": (None, [c_void_p]),
    "raylm_drafts_bind": (None, [c_void_p, POINTER(BatchColumns)]),
    "raylm_drafts_forget": (None, [c_void_p, c_int, c_int64]),
    "raylm_drafts_keep": (None, [c_void_p, c_int, c_int64]),
    "raylm_drafts_prepare": (c_int, [c_void_p, c_int]),
    "raylm_drafts_renew": (c_int, [c_void_p, c_int]),
    "raylm_drafts_force": (None, [c_void_p, c_int, c_void_p, c_int]),
    "raylm_drafts_cut": (None, [c_void_p, c_int, c_int]),
    "raylm_drafts_choose": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "raylm_drafts_renew_and_choose": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "raylm_drafts_arrange": (None, [c_void_p, c_int]),
}


@cache
def drafts_library() -> ctypes.CDLL:
    """The library of drafts.cpp, compiled if needed and loaded once. Raises NativeError.

    It is separate from the kernels, which workers with a GPU do not need, and uses no special CPU instructions. Its
    functions take microseconds and keep the GIL, because getting it back from another thread would take longer.
    """
    return open_library(build("plain", DRAFTS), _FUNCTIONS, ctypes.PyDLL)

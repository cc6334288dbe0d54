"""Memory in huge pages. Reading all weights in every step through 4 KiB pages costs up to 40 % of the bandwidth."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from math import prod

import torch
from torch import Tensor

_HUGE = 2 << 20
_SLAB = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Arena:
    """Allocates zeroed tensors in large slabs. A slab is freed with its last tensor."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to cache lines."""
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if self._used + size > len(self._slab):
            self._slab, self._used = _map(max(size, _SLAB)), 0
        piece = self._slab[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return piece.view(dtype).view(shape)


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor with its own mapping. The system provides its memory on the first write."""
    size = prod(shape) * dtype.itemsize
    return _map(max(size, 1))[:size].view(dtype).view(shape)


def populate(tensor: Tensor) -> bool:
    """Let the system provide the memory of a contiguous tensor now. Keeps its contents. Returns False if it fails.

    Other calls that map memory wait meanwhile: 2 MiB take up to 3 ms.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise()(start, tensor.data_ptr() + tensor.nbytes - start, _MADV_POPULATE_WRITE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _map(size: int) -> Tensor:
    """At least ``size`` bytes, aligned to 2 MiB."""
    mapping = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE
    return whole[skip : len(whole) - (_HUGE - skip)]

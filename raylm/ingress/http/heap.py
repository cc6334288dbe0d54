"""HeapTrimmer: returns free memory of the C heap to the system after large requests."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

TRIM_AFTER_BYTES = 2**18  # tokenizing a text of this length takes 35 MiB
_DELAY_S = 1.0  # between trims; a trim holds the heap's locks for at most 0.1 s
_LARGE_BYTES = 2**17  # of a block; glibc's first value of both limits
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


class HeapTrimmer:
    """Counts the bytes of requests, and returns memory soon after each TRIM_AFTER_BYTES.

    The C library has a heap for each thread and keeps freed memory below the last block that is in use, until
    ``malloc_trim`` is called (where the C library has it). That call does not shrink the heaps of threads. So blocks of
    _LARGE_BYTES are kept out of the heaps: the system has them back when they are freed. glibc would raise this limit
    to the size of any freed block up to 32 MiB. Python keeps thousands of freed tuples, lists and dicts for later use.
    Each keeps 1 MiB of memory that is otherwise free, until a full garbage collection. This takes a millisecond without
    requests, so it waits until there are none.
    """

    def __init__(self, trim: Callable[[], object] | None = None, collect: Callable[[], object] = gc.collect) -> None:
        self._trim = trim or _malloc_trim()
        self._collect = collect
        self._carried = 0
        self._num_open = 0
        self._is_due = False
        self._is_uncollected = False

    def opened(self) -> None:
        """Count a request that begins. ``carried`` ends it."""
        self._num_open += 1

    def carried(self, num_bytes: int) -> None:
        """Count the bytes of body and answer of a finished request."""
        self._num_open -= 1
        self._carried += num_bytes
        is_last = self._is_uncollected and not self._num_open
        if (self._carried >= TRIM_AFTER_BYTES or is_last) and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._carried, self._is_due, self._is_uncollected = 0, False, self._num_open > 0
        if not self._is_uncollected:
            self._collect()
        asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> Callable[[], object]:
    """``malloc_trim`` of this process, with large blocks outside of the heaps from now on."""
    library = ctypes.CDLL(None)
    if (mallopt := getattr(library, "mallopt", None)) is not None:
        for limit in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(limit, _LARGE_BYTES)
    trim = getattr(library, "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))

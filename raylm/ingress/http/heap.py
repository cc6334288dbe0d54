"""HeapTrimmer: returns free memory of the C heap to the system after large requests."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_AFTER_BYTES = 2**18  # tokenizing a text of this length takes 35 MiB
_DELAY_S = 1.0  # between trims; a trim holds the heap's locks for at most 0.1 s


class HeapTrimmer:
    """Counts the bytes of requests, and trims the heap soon after each TRIM_AFTER_BYTES.

    The C library has a heap for each thread and keeps freed memory below the last block that is in use. Without
    ``malloc_trim`` in the C library, HeapTrimmer does nothing.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._carried = 0
        self._is_due = False

    def carried(self, num_bytes: int) -> None:
        """Count the bytes of body and answer of a finished request."""
        self._carried += num_bytes
        if self._carried >= TRIM_AFTER_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._carried, self._is_due = 0, False
        asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> Callable[[], object]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))

"""HeapTrimmer: gives memory that large requests have left free in the C heap back to the system."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_AFTER_BYTES = 2**18  # a text of so many bytes is tokenized in 35 MiB
_DELAY_S = 1.0  # a trim holds the heap's locks for a tenth of a second at most; so often that is not felt


class HeapTrimmer:
    """Counts the bytes that requests carry, and trims the heap soon after TRIM_AFTER_BYTES of them.

    The C library keeps what threads free, in a heap for each, behind the last block that is in use there. Where it has
    no malloc_trim nothing is done.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._carried = 0
        self._is_due = False

    def carried(self, num_bytes: int) -> None:
        """A request with so many bytes of body and answer is over."""
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

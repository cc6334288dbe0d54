"""offload: large pieces of work off the event loop, small ones on it; no request holds up the others for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE = 2_048  # things to walk through; Python does about a million a second, and handing over costs as much as 100


async def offload(work: Callable[[], T], size: int) -> T:
    """``work()``, on a thread if it walks through more than LARGE things.

    A thread takes turns with the loop every few milliseconds while it runs Python code. A single call into C does
    not: such calls must be bounded otherwise.
    """
    return work() if size <= LARGE else await asyncio.to_thread(work)

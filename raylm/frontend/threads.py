"""Work outside the event loop: offload, and Lanes for long work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 2_048  # items; Python handles about a million a second, and starting a thread's work costs as much as 100 items


async def offload(work: Callable[[], T], size: int) -> T:
    """Return ``work()``. Runs it on a thread if ``size``, its number of items, exceeds LARGE.

    A thread that runs Python code takes turns with the loop every few milliseconds. A single call into C does not, so
    such calls must be bounded in another way.
    """
    return work() if size <= LARGE else await asyncio.to_thread(work)


class Lanes:
    """Two threads, for small and for large work, so that small work never waits for large work.

    Each lane is first in, first out. Cancelled work that has not begun is removed.
    """

    def __init__(self, name: str) -> None:
        self._small, self._large = (ThreadPoolExecutor(1, f"{name}-{lane}") for lane in ("small", "large"))

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        lane = self._large if large else self._small
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

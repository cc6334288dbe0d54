"""Work off the event loop: offload, and Lanes for what takes long; no request holds up the others for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 2_048  # things to walk through; Python does about a million a second, and handing over costs as much as 100


async def offload(work: Callable[[], T], size: int) -> T:
    """``work()``, on a thread if it walks through more than LARGE things.

    A thread takes turns with the loop every few milliseconds while it runs Python code. A single call into C does
    not: such calls must be bounded otherwise.
    """
    return work() if size <= LARGE else await asyncio.to_thread(work)


class Lanes:
    """Two threads, one for small pieces of work and one for large, so that no small one waits behind a large one.

    Work begins in the order in which it came, in each lane; what is cancelled before that leaves.
    """

    def __init__(self, name: str) -> None:
        self._small, self._large = (ThreadPoolExecutor(1, f"{name}-{lane}") for lane in ("small", "large"))

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        lane = self._large if large else self._small
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

"""VirtualLoop: an event loop whose time advances only when no task is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks and timers like any loop, in order of time. There is no I/O and no other thread.

    ``time`` is in seconds since the start. If all tasks wait and no timer is left, RuntimeError ends the run.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))
        self._clock_resolution = 1e-9  # timers within this time are due together; sums of floats have smaller errors

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.SelectSelector):
    """Advances the clock to the next timer instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("All tasks are waiting, and no timer is left.")
        self._loop.advance(timeout)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in virtual time."""
    results: list[T] = []

    async def keep() -> None:  # a Runner formats the result of its task, which may be long
        results.append(await main)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(keep())
    return results[0]

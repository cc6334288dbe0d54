"""VirtualLoop: an event loop whose time passes only while nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Tasks and timers run as on any loop, in the order of their times; there is no I/O and no other thread.

    ``time`` is in seconds since the beginning. Where nothing is to come any more RuntimeError ends the run.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))
        self._clock_resolution = 1e-9  # timers nearer than that are due together; sums of floats are off by less

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.SelectSelector):
    """Where a loop would wait for its next timer, the clock goes there."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("All tasks wait, and nothing is to come.")
        self._loop.advance(timeout)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run`` in virtual time."""
    results: list[T] = []

    async def keep() -> None:  # a Runner takes the text of what its task returns, which may be long
        results.append(await main)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(keep())
    return results[0]

"""Closed loops, with a constant number of open requests, and open loops, with requests at given times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
Ask = Callable[[], Awaitable[T]]


async def closed_loop(asks: Iterable[Ask[T]], concurrency: int, ended: Callable[[], object]) -> list[T]:
    """Keep ``concurrency`` requests open until all are done. Returns the answers in the order of their ends."""
    answers: list[T] = []
    todo = iter(asks)

    async def one_after_another() -> None:
        for ask in todo:
            answers.append(await ask())
            ended()

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return answers


async def open_loop(
    asks: Sequence[Ask[T]], times: Sequence[float], ended: Callable[[], object]
) -> tuple[list[T], list[float]]:
    """Send each request at its time, in ascending seconds from now, even if others are still open.

    Returns the answers in order, and the delay in seconds with which each was sent. Delays show a client that is too
    slow.
    """
    begun = time.perf_counter()

    async def counted(ask: Ask[T]) -> T:
        answer = await ask()
        ended()
        return answer

    tasks, late = [], []
    for ask, at in zip(asks, times, strict=True):
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        late.append(time.perf_counter() - begun - at)
        tasks.append(asyncio.ensure_future(counted(ask)))
    return list(await asyncio.gather(*tasks)), late


def poisson(rate: float, number: int, seed: int) -> list[float]:
    """Times of ``number`` arrivals at ``rate`` in a second, the first at 0."""
    gaps = random.Random(seed)
    return list(accumulate((gaps.expovariate(rate) for _ in range(number - 1)), initial=0.0))

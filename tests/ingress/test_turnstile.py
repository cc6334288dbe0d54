"""A crowd passes a few at a time, in order, and others get their turn in between."""

from __future__ import annotations

import asyncio

import pytest

from raylm.ingress.turnstile import PER_TURN, Turnstile


async def test_a_crowd_passes_in_order_a_few_in_each_turn() -> None:
    turnstile, passed, turns = Turnstile(), [], 0

    async def come(place: int) -> None:
        await turnstile.enter()
        passed.append((place, turns))

    crowd = [asyncio.create_task(come(place)) for place in range(10 * PER_TURN)]
    while len(passed) < len(crowd):
        before = len(passed)
        await asyncio.sleep(0)
        turns += 1
        assert len(passed) - before <= PER_TURN
    assert [place for place, _ in passed] == list(range(len(crowd)))
    assert turns >= 10


async def test_who_leaves_while_waiting_holds_up_nobody() -> None:
    turnstile = Turnstile()
    crowd = [asyncio.create_task(turnstile.enter()) for _ in range(5 * PER_TURN)]
    await asyncio.sleep(0)
    leaving = crowd[PER_TURN::2]
    for task in leaving:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert [task for task in crowd if task.cancelled()] == leaving
    last = asyncio.create_task(turnstile.enter())
    for _ in range(3):
        await asyncio.sleep(0)
    assert last.done()


async def test_alone_nobody_waits() -> None:
    turnstile = Turnstile()
    for _ in range(PER_TURN):
        with pytest.raises(StopIteration):  # it ran to its end in one go
            turnstile.enter().send(None)

"""Throttle: lets a few requests pass in each turn of the event loop, so that a crowd holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8  # each then takes a part of a millisecond to be read, checked and rendered, or refused


class Throttle:
    """First come, first through. What does not pass here, such as /health, gets its turn in between."""

    def __init__(self) -> None:
        self._left = PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Pass, in this turn of the loop or a later one."""
        if self._left == PER_TURN:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        passing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(passing)
        await passing

    def _turn(self) -> None:
        self._left = PER_TURN
        while self._waiting and self._left:
            passing = self._waiting.popleft()
            if not passing.done():
                passing.set_result(None)
                self._left -= 1
        if self._left < PER_TURN:
            asyncio.get_running_loop().call_soon(self._turn)

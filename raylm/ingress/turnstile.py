"""Turnstile: lets few requests pass in each turn of the event loop, so that a crowd holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """First come, first through. What does not pass here, such as /health, gets its turn in between.

    Args:
        per_turn: how many pass in one turn.
        turns: how many turns these have for themselves.
    """

    def __init__(self, per_turn: int = 8, turns: int = 1) -> None:
        self._per_turn = per_turn
        self._turns = turns
        self._left = per_turn
        self._rest = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Pass, in this turn of the loop or a later one."""
        if self._left and not self._waiting:
            self._pass()
            return
        passing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(passing)
        await passing

    def _pass(self) -> None:
        if self._left == self._per_turn:
            self._rest = self._turns
            asyncio.get_running_loop().call_soon(self._turn)
        self._left -= 1

    def _turn(self) -> None:
        self._rest -= 1
        if self._rest:
            asyncio.get_running_loop().call_soon(self._turn)
            return
        self._left = self._per_turn
        while self._waiting and self._left:
            passing = self._waiting.popleft()
            if not passing.done():
                passing.set_result(None)
                self._pass()

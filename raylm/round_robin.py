"""RoundRobin: chooses among names that wait the one whose last turn is longest ago."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count


class RoundRobin:
    """Remembers only names that waited at the last choice, so a name that comes new has its turn first."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._numbers = count()

    def choose(self, waiting: Iterable[str]) -> str:
        """Give the turn to one of the ``waiting`` names, which must not be empty. The first of equal names wins."""
        names = dict.fromkeys(waiting)
        chosen = min(names, key=lambda name: self._turns.get(name, -1))
        self._turns = {name: turn for name, turn in self._turns.items() if name in names}
        self._turns[chosen] = next(self._numbers)
        return chosen

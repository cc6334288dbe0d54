"""Branches: how many of the latest prompts went on from one block, so that one more copy up to there serves many."""

from __future__ import annotations

from collections import deque

_PROMPTS = 128


class Branches:
    """The last block that engines told to hold, of each of the latest prompts; ``note`` adds one and counts its like.

    Behind a system prompt every new chat goes on from the same block, on any engine that holds it, while later turns
    go on from their own. To compute such a prefix on one engine more serves the prompts to come as well: they are taken
    to be as many as of late, and each is charged an equal part of it (amortised cost: R. Tarjan, "Amortized
    computational complexity", 1985).
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_PROMPTS)

    def note(self, block: int) -> int:
        self._latest.append(block)
        return self._latest.count(block)

"""Branches: counts how many of the latest prompts share a last cached block, to decide about one more copy."""

from __future__ import annotations

from collections import deque

_PROMPTS = 128


class Branches:
    """The last known cached block of each of the latest prompts. ``note`` adds a block and returns its count.

    After a system prompt, every new chat continues from the same block, on any engine that has it. Later turns continue
    from their own blocks. Computing a shared prefix on one more engine serves later prompts too. Their expected number
    is the recent count, and each prompt pays an equal share of the cost (amortised cost: R. Tarjan, "Amortized
    computational complexity", 1985).
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_PROMPTS)

    def note(self, block: int) -> int:
        self._latest.append(block)
        return self._latest.count(block)

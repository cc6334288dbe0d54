"""Five loads for a fleet: what arrives when, as prompts of whole blocks that are named by numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count

TURN_BLOCKS = 8  # most new blocks of a turn
THINK_S = {"chat": 3.0, "agents": 1.0}


@dataclass
class Turn:
    """A request: it arrives ``at`` seconds, and draws ``output`` tokens; ``later`` turns follow its end."""

    at: float
    blocks: list[int]
    output: int
    later: int = 0
    ingress: int = 0
    engine: int = -1
    first_token: float = 0.0
    to_compute: int = 0
    to_draw: int = 0
    hashes: list[bytes] = field(default_factory=list)


class Load:
    """One of the five; ``requests`` arrive at ``rate`` a second in the mean."""

    def __init__(self, kind: str, requests: int, rate: float, seed: int) -> None:
        self.kind, self._rng, self._new = kind, random.Random(seed), count(1)
        self._requests, self._rate = requests, rate

    def arrivals(self) -> Iterator[Turn]:
        """All requests but the later turns of sessions, in time."""
        rng = self._rng
        group = {"chat": 6, "agents": 12, "burst": 16}.get(self.kind, 1)
        gaps = (rng.expovariate(self._rate / group) for _ in range(self._requests // group))
        for at in accumulate(gaps):
            yield from getattr(self, f"_{self.kind}")(at)

    def next_turn(self, turn: Turn, now: float) -> Turn:
        """What follows a turn that has ended: all of it, its answer and something new."""
        blocks = turn.blocks + self._blocks(max(1, turn.output // 64) + self._rng.randint(1, TURN_BLOCKS))
        at = now + self._rng.expovariate(1 / THINK_S[self.kind])
        return Turn(at, blocks, self._output(), turn.later - 1)

    def _blocks(self, number: int) -> list[int]:
        return [next(self._new) for _ in range(number)]

    def _shared(self, name: int, number: int) -> list[int]:
        return [1_000_000_000 + 1000 * name + block for block in range(number)]

    def _output(self) -> int:
        return self._rng.randint(*{"agents": (16, 128), "burst": (64, 256)}.get(self.kind, (32, 256)))

    def _hot(self, at: float) -> Iterator[Turn]:
        """Of 50 system prompts one has 70 %, and the others by Zipf."""
        rng = self._rng
        prompt = 0 if rng.random() < 0.7 else rng.choices(range(50), [(rank + 1) ** -1.1 for rank in range(50)])[0]
        yield Turn(at, self._shared(prompt, 32) + self._blocks(rng.randint(1, 8)), self._output())

    def _unique(self, at: float) -> Iterator[Turn]:
        yield Turn(at, self._blocks(self._rng.randint(2, 64)), self._output())

    def _chat(self, at: float) -> Iterator[Turn]:
        blocks = self._shared(0, 8) + self._blocks(self._rng.randint(1, TURN_BLOCKS))
        yield Turn(at, blocks, self._output(), self._rng.randint(2, 12) - 1)

    def _agents(self, at: float) -> Iterator[Turn]:
        """A few sessions have most turns; 8 kinds of agents share 4,096 tokens each."""
        rng = self._rng
        turns = rng.randint(20, 50) if rng.random() < 0.15 else rng.randint(2, 8)
        blocks = self._shared(rng.randrange(8), 64) + self._blocks(rng.randint(1, TURN_BLOCKS))
        yield Turn(at, blocks, self._output(), turns - 1)

    def _burst(self, at: float) -> Iterator[Turn]:
        blocks = self._blocks(self._rng.randint(8, 48))
        for sibling in range(16):
            yield Turn(at + 1e-4 * sibling, blocks, self._output())

"""History: samples of the engines' load in the last ten minutes, taken by this ingress replica."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raylm.messages import EngineStats

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

LENGTH_S, EVERY_S = 600, 2.0


class History:
    """Samples of all engines together, the oldest first: one every two seconds, for ten minutes."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.samples: deque[dict[str, Any]] = deque(maxlen=int(LENGTH_S / EVERY_S))

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)

    def take(self) -> None:
        """Add a sample."""
        self.samples.append(sample(time.time(), self._llm.engine_stats))


def sample(at: float, stats: Mapping[str, EngineStats]) -> dict[str, Any]:
    """One point of each chart: sequences, the mean share of KV blocks in use, and generated tokens by engine.

    ``at`` is in seconds since the epoch. Tokens are counters, which begin at 0 in a new engine.
    """
    engines = stats.values()
    return {
        "at": at,
        "running": sum(engine.running for engine in engines),
        "waiting": sum(engine.waiting for engine in engines),
        "kv_usage": sum(engine.kv_usage for engine in engines) / max(1, len(engines)),
        "generation_tokens": {name: engine.counters.generation_tokens for name, engine in stats.items()},
    }

"""RendezvousHash: the engine that all ingresses choose for a prefix that no engine has reported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from raylm.frontend.engines.routed_engine import RoutedEngine

_PROMPTS = 32  # prompts over which ``found`` is averaged
_EXPECTED = 8  # weight of the initial value of ``found``, in prompts
_BITS, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15  # multiplicative hashing (Knuth, vol. 3, 6.4)


class RendezvousHash:
    """Chooses an engine for a prompt by its first unknown block.

    Another ingress may have just sent the same prefix. With highest random weight hashing (D. Thaler and C.
    Ravishankar, "Using name-based mappings to increase hit rates", 1998) both choose the same engine without
    communication. ``found`` is the mean share of a prompt that engines reported to have. If prompts do not repeat, a
    common choice has no use. ``found`` begins at 1: while caches are empty, every prefix is computed for the first
    time. Ingresses that choose differently then pay for a copy each, and ingresses that needlessly choose the same
    engine pay for a queue.
    """

    def __init__(self) -> None:
        self.found = 1.0
        self._prompts = _EXPECTED

    def learn(self, share: float) -> None:
        """Update ``found`` with the share of another prompt."""
        self._prompts = min(self._prompts + 1, _PROMPTS)
        self.found += (share - self.found) / self._prompts

    def place(self, blocks: Sequence[int], matched: int, engines: list[RoutedEngine]) -> int | None:
        """The index of the chosen engine. None if all whole blocks are ``matched`` or no other client exists."""
        if matched == len(blocks) or not any(engine.others.exist for engine in engines):
            return None
        block = blocks[matched]
        weights = [(block ^ _number(engine.client.info.engine_id)) * _GOLDEN & _BITS for engine in engines]
        return weights.index(max(weights))


@lru_cache(1024)
def _number(engine_id: str) -> int:
    """The id as 64 bits, equal in every process."""
    return int.from_bytes(blake2b(engine_id.encode(), digest_size=8).digest())

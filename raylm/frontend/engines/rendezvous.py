"""Rendezvous: the engine that all ingresses name for what none of them has been told of yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from raylm.frontend.engines.routed_engine import RoutedEngine

_PROMPTS = 32  # over which ``found`` is averaged
_EXPECTED = 8  # prompts that the expectation before the first one counts for
_BITS, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15  # multiplicative hashing (Knuth, vol. 3, 6.4)


class Rendezvous:
    """Where a prompt goes on behind its blocks that are known, by the first one that is not.

    Another ingress may have sent the same prefix of late; by highest random weight (D. Thaler and C. Ravishankar,
    "Using name-based mappings to increase hit rates", 1998) both send it to one engine, without a word. ``found`` is
    the share of prompts that engines usually told to hold: where no prompt comes again there is nothing to meet for.
    At first all are expected to come again: while caches are empty every prefix is computed for the first time, and
    ingresses that part then pay for a copy each, those that meet in vain for a queue.
    """

    def __init__(self) -> None:
        self.found = 1.0
        self._prompts = _EXPECTED

    def learn(self, share: float) -> None:
        """Of another prompt so much was in what engines told."""
        self._prompts = min(self._prompts + 1, _PROMPTS)
        self.found += (share - self.found) / self._prompts

    def place(self, blocks: Sequence[int], matched: int, engines: list[RoutedEngine]) -> int | None:
        """Of the engine named; None where all of a prompt's whole blocks are ``matched``, or nobody else sends any."""
        if matched == len(blocks) or not any(engine.others.exist for engine in engines):
            return None
        block = blocks[matched]
        weights = [(block ^ _number(engine.client.info.engine_id)) * _GOLDEN & _BITS for engine in engines]
        return weights.index(max(weights))


@lru_cache(1024)
def _number(engine_id: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(engine_id.encode(), digest_size=8).digest())

"""Other policies of the field as members of the Router's family: each only chooses, all else is RayLM's.

Each knows what the Router knows: its own requests at once, others' load and the engines' blocks as they were told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from raylm.frontend import RoutedEngine, Router
from raylm.frontend.engines.routed_engine import PromptBlocks
from raylm.frontend.engines.router import Choice

BLOCK = 64  # tokens that the policies below count as one


class RoundRobin(Router):
    """One after the other."""

    turn = 0

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        self.turn += 1
        return self.turn % len(engines), [0.0] * len(engines)


class _Scored(Router, ABC):
    """The least score wins; among equals any."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        scores = [self.score(engine, one, prompt.length) for engine, one in zip(engines, uncached, strict=True)]
        return self._rng.choice([place for place, score in enumerate(scores) if score == min(scores)]), scores

    @abstractmethod
    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        """Of an engine that would have to compute ``uncached`` of the prompt's ``tokens``."""


def _open(engine: RoutedEngine) -> int:
    return engine.sequences + engine.stats.others.sequences


def _blocks(engine: RoutedEngine) -> float:
    """Held by its open requests, by what this ingress knows of its own; others' are taken for as large."""
    own = sum(len(one.blocks) for one in engine.open.values()) * engine.client.info.worker.block_size / BLOCK
    return own * _open(engine) / engine.sequences if engine.sequences else 0.0


class LeastOpen(_Scored):
    """Least own requests, and among those least of others."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        return engine.sequences + engine.stats.others.sequences / 1e6


class DynamoLinear(_Scored):
    """Prefill blocks, those queued included, and blocks that decode."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        queued = engine.queued_tokens + engine.stats.others.queued_tokens
        return (queued + uncached) / BLOCK + _blocks(engine) + tokens / BLOCK


class DynamoLmetric(_Scored):
    """The product of the two."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        queued = engine.queued_tokens + engine.stats.others.queued_tokens
        return (queued + uncached) / BLOCK * (_blocks(engine) + tokens / BLOCK + 1)


class LlmD(_Scored):
    """llm-d's weights with precise prefixes: twice the share that is cached, KV headroom, and the queue."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        self._most = max(1, *map(_open, engines))
        return super().choose(prompt, engines, uncached)

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        used = min(1.0, _blocks(engine) * BLOCK / (engine.client.info.worker.num_blocks * 64))
        return -(2 * (1 - uncached / tokens) + (1 - used) + (1 - _open(engine) / self._most))


class Smg(_Scored):
    """SGLang's gateway by events: the longest prefix, unless own requests are out of balance by 10 and half as many."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        own = [engine.sequences for engine in engines]
        self._by_load = max(own) - min(own) > 10 and max(own) > 1.5 * min(own)
        return super().choose(prompt, engines, uncached)

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        return engine.sequences if self._by_load else uncached + engine.sequences / 1e6


class Approximate(Router):
    """SGLang's gateway without events: the longest prefix among what it sent itself, if that is half of the prompt.

    Else where it sent least, by tokens; and the least own requests where these are out of balance as above.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sent: dict[RoutedEngine, set[int]] = {}

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        tokens, chain, parent = prompt.request.prompt_token_ids, list[int](), 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = hash((parent, *tokens[start : start + BLOCK]))
            chain.append(parent)
        trees = [self._sent.setdefault(engine, set()) for engine in engines]
        own = [engine.sequences for engine in engines]
        if max(own) - min(own) > 10 and max(own) > 1.5 * min(own):
            scores = [float(count) for count in own]
        else:
            scores = [
                -float(next((n for n, block in enumerate(chain) if block not in tree), len(chain))) for tree in trees
            ]
            if -min(scores) * BLOCK < 0.5 * len(tokens):
                scores = [float(len(tree)) for tree in trees]
        place = self._rng.choice([place for place, score in enumerate(scores) if score == min(scores)])
        trees[place].update(chain)
        return place, scores


POLICIES: dict[str, Callable[..., Router]] = {
    "RayLM": Router,
    "round robin": RoundRobin,
    "least open": LeastOpen,
    "Dynamo linear": DynamoLinear,
    "Dynamo lmetric": DynamoLmetric,
    "llm-d": LlmD,
    "SMG": Smg,
    "SGLang approximate": Approximate,
}

"""Routing policies of other projects as subclasses of Router. They replace only the choice.

They know what the Router knows: the ingress's own requests immediately, the load of other ingresses and the engines'
blocks with delay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from raylm.frontend import RoutedEngine, Router
from raylm.frontend.engines.prompt_blocks import PromptBlocks
from raylm.frontend.engines.router import Choice
from raylm.messages import EngineCoreRequest

BLOCK = 64  # tokens in a block for the policies below


class RoundRobin(Router):
    """Chooses the engines in turn."""

    turn = 0

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        self.turn += 1
        return self.turn % len(engines), [0.0] * len(engines)


class Random(Router):
    """Chooses any engine."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        return self._rng.randrange(len(engines)), [0.0] * len(engines)


class PowerOfTwo(Router):
    """Chooses two engines at random, and of them the one with fewer requests, as Ray Serve's default."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        two = self._rng.sample(range(len(engines)), 2)
        return min(two, key=lambda place: _open(engines[place])), [float(_open(engine)) for engine in engines]


class SessionAffinity(Router):
    """Chooses by a hash of the prompt's first 2,048 tokens, which identify the session without a header."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        session = hash(tuple(prompt.request.prompt_token_ids[:2048]))
        scores = [float(hash((session, place))) for place in range(len(engines))]
        return scores.index(min(scores)), scores


class _Scored(Router, ABC):
    """Chooses the engine with the lowest score, at random among equals."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        scores = [self.score(engine, one, prompt.length) for engine, one in zip(engines, uncached, strict=True)]
        return self._rng.choice([place for place, score in enumerate(scores) if score == min(scores)]), scores

    @abstractmethod
    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        """The score of an engine that must compute ``uncached`` of the prompt's ``tokens``."""


def _open(engine: RoutedEngine) -> int:
    return engine.sequences + engine.stats.others.sequences


def _blocks(engine: RoutedEngine) -> float:
    """Blocks of an engine's open requests.

    Requests of other ingresses are assumed to have the average size of own requests.
    """
    own = sum(len(one.blocks) for one in engine.open.values()) * engine.client.info.worker.block_size / BLOCK
    return own * _open(engine) / engine.sequences if engine.sequences else 0.0


class LeastOpen(_Scored):
    """Chooses the engine with the fewest own requests, and among equals with the fewest requests of others."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        return engine.sequences + engine.stats.others.sequences / 1e6


class DynamoLinear(_Scored):
    """Scores by prefill blocks, including queued requests, plus decode blocks."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        queued = engine.queued_tokens + engine.stats.others.queued_tokens
        return (queued + uncached) / BLOCK + _blocks(engine) + tokens / BLOCK


class DynamoLmetric(_Scored):
    """Scores by the product of prefill and decode blocks."""

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        queued = engine.queued_tokens + engine.stats.others.queued_tokens
        return (queued + uncached) / BLOCK * (_blocks(engine) + tokens / BLOCK + 1)


class LlmD(_Scored):
    """llm-d's weights with precise prefixes: cached share (twice), free KV cache, and queue length."""

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        self._most = max(1, *map(_open, engines))
        return super().choose(prompt, engines, uncached)

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        used = min(1.0, _blocks(engine) * BLOCK / (engine.client.info.worker.num_blocks * 64))
        return -(2 * (1 - uncached / tokens) + (1 - used) + (1 - _open(engine) / self._most))


class Smg(_Scored):
    """SGLang's gateway with events: the longest cached prefix.

    If the numbers of own requests differ by more than 10 and by more than half, it chooses the engine with the fewest.
    """

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        own = [engine.sequences for engine in engines]
        self._by_load = max(own) - min(own) > 10 and max(own) > 1.5 * min(own)
        return super().choose(prompt, engines, uncached)

    def score(self, engine: RoutedEngine, uncached: int, tokens: int) -> float:
        return engine.sequences if self._by_load else uncached + engine.sequences / 1e6


class _OwnPrefixes(Router, ABC):
    """The base of policies that remember the prefixes that they sent to each engine, and read no reports."""

    share = 0.5
    """Least share of the prompt that must be known for a choice by prefix."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sent: dict[RoutedEngine, set[int]] = {}

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        tokens, chain, parent = prompt.request.prompt_token_ids, list[int](), 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = hash((parent, *tokens[start : start + BLOCK]))
            chain.append(parent)
        trees = [self._sent.setdefault(engine, set()) for engine in engines]
        if (scores := self.by_load(engines)) is None:
            scores = [
                -float(next((n for n, block in enumerate(chain) if block not in tree), len(chain))) for tree in trees
            ]
            if -min(scores) * BLOCK < self.share * len(tokens):
                scores = [float(len(tree)) for tree in trees]
        place = self._rng.choice([place for place, score in enumerate(scores) if score == min(scores)])
        trees[place].update(chain)
        return place, scores

    @abstractmethod
    def by_load(self, engines: list[RoutedEngine]) -> list[float] | None:
        """Scores by load alone, if the engines are out of balance."""


class Approximate(_OwnPrefixes):
    """SGLang's gateway without events: the longest prefix among its own requests, if it is half of the prompt.

    Otherwise it chooses the engine that got the fewest tokens. If the numbers of own requests are out of balance, it
    chooses the engine with the fewest.
    """

    def by_load(self, engines: list[RoutedEngine]) -> list[float] | None:
        own = [engine.sequences for engine in engines]
        return [float(count) for count in own] if max(own) - min(own) > 10 and max(own) > 1.5 * min(own) else None


class ServePrefix(_OwnPrefixes):
    """Ray Serve's prefix-aware router: like ``Approximate``, if the prefix is a tenth of the prompt.

    If the numbers of requests differ by more than 10, it takes the better of two random engines.
    """

    share = 0.1

    def by_load(self, engines: list[RoutedEngine]) -> list[float] | None:
        counts = [_open(engine) for engine in engines]
        if max(counts) - min(counts) <= 10:
            return None
        two = self._rng.sample(range(len(engines)), 2)
        return [float(count) if place in two else float("inf") for place, count in enumerate(counts)]


class Subset(Router):
    """RayLM's Router with a quarter of the engines. Four ingresses have different quarters."""

    def _able(self, request: EngineCoreRequest, fingerprint: str | None) -> list[RoutedEngine]:
        engines = sorted(super()._able(request, fingerprint), key=lambda engine: engine.client.info.engine_id)
        return engines[self._rank % 4 :: 4]


POLICIES: dict[str, Callable[..., Router]] = {
    "RayLM": Router,
    "a quarter of the engines": Subset,
    "random": Random,
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "session affinity": SessionAffinity,
    "least open": LeastOpen,
    "Dynamo linear": DynamoLinear,
    "Dynamo lmetric": DynamoLmetric,
    "llm-d": LlmD,
    "SMG": Smg,
    "SGLang approximate": Approximate,
    "Serve prefix": ServePrefix,
}

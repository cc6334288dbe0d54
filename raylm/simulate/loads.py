"""Loads: random arrivals of requests, and loads from traces."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import accumulate, count
from math import pi, sin

from pydantic import Field

from raylm.config import Frozen
from raylm.simulate.trace import SessionTurn, SimulatedRequest

Range = tuple[int, int]
_SHARED = 1 << 30  # first token of shared prompts


class LoadSettings(Frozen):
    """Parameters of a load. Ranges are for uniformly distributed integers; the default depends on the load."""

    requests: int = Field(4000, ge=1)
    """Total number of requests, with later turns of sessions. It is exact only on average."""
    rate: float = Field(24.0, gt=0)
    """Mean number of requests in a second."""
    prompt_tokens: Range | None = None
    """New tokens of a prompt, or of a turn."""
    output_tokens: Range | None = None
    """Tokens of an answer."""
    keys: int = Field(1, ge=1)
    """Number of keys that send requests in turn."""
    seed: int = 1


class Load(ABC):
    """Requests in order of arrival. Later turns of a session are drawn with its first turn."""

    group = 1  # mean number of requests for each arrival
    prompt_tokens: Range = (128, 4096)
    output_tokens: Range = (32, 256)
    think_s = 1.0

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._new = count(1)
        self._prompt_range = settings.prompt_tokens or self.prompt_tokens
        self._output_range = settings.output_tokens or self.output_tokens

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """All requests except later turns of sessions."""
        settings = self._settings
        for number, at in enumerate(self._times(settings.requests // self.group, settings.rate / self.group)):
            for request in self._arrive(at):
                request.key = f"key-{number % settings.keys}"
                yield request

    @abstractmethod
    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        """The requests of one arrival."""

    def _times(self, number: int, rate: float) -> Iterator[float]:
        return accumulate(self._rng.expovariate(rate) for _ in range(number))

    def _request(self, at: float, prompt: list[int], turns: int = 1) -> SimulatedRequest:
        drawn = self._drawn()
        later = [
            SessionTurn(self._rng.expovariate(1 / self.think_s), self._own(), self._drawn()) for _ in range(turns - 1)
        ]
        return SimulatedRequest(at, prompt, [prompt[-1]], drawn, later=later)

    def _drawn(self) -> int:
        return self._rng.randint(*self._output_range)

    def _own(self) -> list[int]:
        return [next(self._new)] * self._rng.randint(*self._prompt_range)

    def _shared(self, name: int, tokens: int) -> list[int]:
        return [_SHARED + name] * tokens


class Poisson(Load):
    """Prompts that share no prefix."""

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        return [self._request(at, self._own())]


class Diurnal(Poisson):
    """As Poisson, with a rate that varies by 80 %, in periods of a tenth of the run."""

    def _times(self, number: int, rate: float) -> Iterator[float]:
        period, at, left = number / rate / 10, 0.0, number
        while left:
            at += self._rng.expovariate(1.8 * rate)
            if self._rng.random() * 1.8 < 1 + 0.8 * sin(2 * pi * at / period):
                left -= 1
                yield at


class Hot(Load):
    """50 system prompts of 2,048 tokens. One has 70 % of the requests, the others follow Zipf's law."""

    prompt_tokens = (64, 512)

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        rng, weights = self._rng, [(rank + 1) ** -1.1 for rank in range(50)]
        prompt = 0 if rng.random() < 0.7 else rng.choices(range(50), weights)[0]
        return [self._request(at, self._shared(prompt, 2048) + self._own())]


class Sessions(Load):
    """Chats of 2 to 12 turns with the same system prompt of 512 tokens."""

    group, think_s, prompt_tokens = 6, 3.0, (64, 512)

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        return [self._request(at, self._shared(0, 512) + self._own(), turns=self._rng.randint(2, 12))]


class Agents(Load):
    """Agents of 8 kinds, each with 4,096 shared tokens. A few sessions have most turns."""

    group, prompt_tokens, output_tokens = 12, (64, 512), (16, 128)

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        rng = self._rng
        turns = rng.randint(20, 50) if rng.random() < 0.15 else rng.randint(2, 8)
        return [self._request(at, self._shared(rng.randrange(8), 4096) + self._own(), turns=turns)]


class Bursts(Load):
    """16 requests with the same prompt within 2 ms."""

    group, prompt_tokens, output_tokens = 16, (512, 3072), (64, 256)

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        prompt = self._own()
        return [self._request(at + 1e-4 * sibling, prompt) for sibling in range(16)]


LOADS: dict[str, type[Load]] = {
    "poisson": Poisson,
    "hot": Hot,
    "sessions": Sessions,
    "agents": Agents,
    "bursts": Bursts,
    "diurnal": Diurnal,
}


class Replay(Load):
    """The requests of a trace."""

    def __init__(self, requests: Iterable[SimulatedRequest]) -> None:
        super().__init__(LoadSettings())
        self._requests = requests

    def arrivals(self) -> Iterator[SimulatedRequest]:
        return iter(self._requests)

    def _arrive(self, at: float) -> Iterable[SimulatedRequest]:
        return ()

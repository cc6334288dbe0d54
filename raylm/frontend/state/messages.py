"""What an ingress replica and the state actor tell each other, in one call at a time: StateReport, StateReply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import Metric

from raylm.messages import LoRAAdapter

WINDOW_S = 60.0
BUCKET_S = 1.0  # usage counts by second
COUNTED_S = BUCKET_S + WINDOW_S  # from the begin of a second: whatever happened in it counts for the whole window
LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Bounds of one API key over all ingress replicas; None is no bound.

    In any 60 seconds at most so many requests begin and so many tokens (of prompts and answers) are served, and at any
    time at most ``concurrency`` requests are open.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def bounds_requests(self) -> bool:
        return self.requests_per_minute is not None or self.concurrency is not None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Claim:
    """What is asked of the limits of ``key``: to let one request in (``tokens`` None), or to serve so many tokens."""

    key: str
    limits: KeyLimits
    tokens: int | None = None


@dataclass(slots=True)
class Usage:
    """What one replica has taken of the limits of one key: a row.

    A row is always sent whole and replaces the row that was known, so a row that arrives twice counts once.
    ``open`` are requests, ``reserved`` are tokens of open requests. ``requests`` that have begun and ``tokens`` that
    were served count by second: the number by the second's begin, of one clock that never goes back. The state gives
    each change a ``version``; the higher one is newer.
    """

    open: int = 0
    reserved: int = 0
    requests: dict[float, int] = field(default_factory=dict)
    tokens: dict[float, int] = field(default_factory=dict)
    version: int = 0

    def take(self, tokens: int | None, now: float) -> None:
        """Add a claim that was granted."""
        if tokens is None:
            self.open += 1
            _count(self.requests, 1, now)
        else:
            self.reserved += tokens

    def give_back(self, tokens: int | None, served: int, now: float) -> None:
        """End a claim of which so many tokens were served."""
        if tokens is None:
            self.open -= 1
        else:
            self.reserved -= tokens
        _count(self.tokens, served, now)

    def end(self, now: float) -> None:
        """The replica is gone: its requests have ended, and what they might have been served counts as served."""
        _count(self.tokens, self.reserved, now)
        self.open = self.reserved = 0

    def moved(self, by_s: float) -> Usage:
        """A copy for a clock that is ``by_s`` seconds ahead."""
        requests = {at + by_s: number for at, number in self.requests.items()}
        tokens = {at + by_s: number for at, number in self.tokens.items()}
        return Usage(self.open, self.reserved, requests, tokens, self.version)

    def expire(self, now: float) -> bool:
        """Forget seconds that have left the window. Returns whether nothing is left."""
        for counts in (self.requests, self.tokens):
            while counts and (first := next(iter(counts))) + COUNTED_S <= now:
                del counts[first]
        return not (self.open or self.reserved or self.requests or self.tokens)


def _count(counts: dict[float, int], number: int, now: float) -> None:
    if number:
        second = float(math.floor(now))
        counts[second] = counts.get(second, 0) + number


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a key stands behind a claim; ``refused_by`` is None if it was granted.

    ``reset_…_s`` are the seconds until all is there again if nothing more is asked, None where there is no limit.
    """

    limits: KeyLimits
    refused_by: LimitName | None = None
    retry_after_s: float = 0.0
    remaining_requests: int | None = None
    remaining_tokens: int | None = None
    reset_requests_s: float | None = None
    reset_tokens_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """What was last decided about the adapter of a name; the higher revision holds.

    While it is ``loading`` engines may have it or not. One that has it although it was ``unloaded`` is to give it up.
    """

    adapter: LoRAAdapter
    decided: Literal["loading", "loaded", "unloaded"]
    revision: int

    @property
    def name(self) -> str:
        return self.adapter.name


@dataclass(frozen=True, slots=True)
class StateReport:
    """What one replica tells the state; it also says that the replica lives.

    ``at`` is the replica's clock in seconds; a report older than the last one of the replica is ignored.
    ``incarnation`` is the state that the replica believes to speak to. "" is a whole report: it has all rows, and as
    ``others`` the rows of other replicas, by replica and key, as the replica has heard of them. A report that is not
    whole has the ``rows``, by key, that have changed since the last report that was answered, and those of claims.
    ``version`` is the newest row of others that the replica knows. ``series`` are its metrics, None if they were told
    a moment ago. ``adapters`` are all its entries, if they have changed, ``adapters_version`` the set that it knows.
    """

    replica: str
    at: float
    incarnation: str = ""
    rows: Mapping[str, Usage] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Usage]] = field(default_factory=dict)
    version: int = -1
    claims: tuple[Claim, ...] = ()
    series: tuple[Metric, ...] | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    adapters_version: int = -1


@dataclass(frozen=True, slots=True)
class StateReply:
    """``standings`` answer the claims, in their order. None: nothing was granted; send a whole report with the claims.

    ``at`` is the state's clock in seconds. ``others`` are the rows of other replicas that have changed since
    ``version`` of the report, by replica and key. ``adapters`` are all entries, None where the replica knows them.
    """

    incarnation: str
    at: float
    standings: tuple[Standing, ...] | None = None
    others: Mapping[str, Mapping[str, Usage]] = field(default_factory=dict)
    version: int = -1
    adapters: tuple[AdapterEntry, ...] | None = None
    adapters_version: int = -1

"""StateReport and StateReply: the messages between an ingress replica and the state actor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import Metric

from raylm.messages import LoRAAdapter

WINDOW_S = 60.0
BUCKET_S = 1.0  # usage is counted by second
COUNTED_S = BUCKET_S + WINDOW_S  # from the begin of a second: all usage in it counts for the whole window
LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key over all ingress replicas. None means no limit.

    ``requests_per_minute`` limits the requests that begin, and ``tokens_per_minute`` the tokens of prompts and answers
    that are served, in any 60 seconds. ``concurrency`` limits the requests that are open at the same time.
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
    """A claim to limits of ``key``: to open one request (``tokens`` None), or to serve ``tokens`` tokens.

    A request that ``begins`` counts for requests_per_minute. A request that another replica began does not.
    """

    key: str
    limits: KeyLimits
    tokens: int | None = None
    begins: bool = True


@dataclass(slots=True)
class KeyUsage:
    """A row: the usage of one key by one replica.

    A row is always sent whole and replaces the known row, so a repeated row counts once. ``open`` is the number of open
    requests, ``reserved`` their reserved tokens. ``requests`` that have begun and ``tokens`` that were served are
    counted by second; the keys are the begin of each second in a monotonic clock. The state gives each change a
    ``version``; the higher one is newer.
    """

    open: int = 0
    reserved: int = 0
    requests: dict[float, int] = field(default_factory=dict)
    tokens: dict[float, int] = field(default_factory=dict)
    version: int = 0

    def take(self, claim: Claim, now: float) -> None:
        """Add a granted claim."""
        if claim.tokens is None:
            self.open += 1
            _count(self.requests, int(claim.begins), now)
        else:
            self.reserved += claim.tokens

    def give_back(self, tokens: int | None, served: int, now: float) -> None:
        """End a claim, of which ``served`` tokens were served."""
        if tokens is None:
            self.open -= 1
        else:
            self.reserved -= tokens
        _count(self.tokens, served, now)

    def end(self, now: float) -> None:
        """End all claims of a replica that is gone. Its reserved tokens count as served."""
        _count(self.tokens, self.reserved, now)
        self.open = self.reserved = 0

    def moved(self, by_s: float) -> KeyUsage:
        """A copy for a clock that is ``by_s`` seconds ahead."""
        requests = {at + by_s: number for at, number in self.requests.items()}
        tokens = {at + by_s: number for at, number in self.tokens.items()}
        return KeyUsage(self.open, self.reserved, requests, tokens, self.version)

    def expire(self, now: float) -> bool:
        """Remove seconds that have left the window. Returns whether the row is empty."""
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
    """The state of a key after a claim. ``refused_by`` is None if the claim was granted.

    ``reset_…_s`` are the seconds until the full limit is available again without further claims, None without a limit.
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
    """The latest decision about the adapter with a name. The entry with the highest revision is valid.

    While an adapter is ``loading``, engines may or may not have it. An engine that has an ``unloaded`` adapter must
    unload it.
    """

    adapter: LoRAAdapter
    decided: Literal["loading", "loaded", "unloaded"]
    revision: int

    @property
    def name(self) -> str:
        return self.adapter.name


@dataclass(frozen=True, slots=True)
class StateReport:
    """A report of one replica to the state. It also shows that the replica is alive.

    ``at`` is the replica's clock in seconds; a report older than the replica's last one is ignored. ``incarnation`` is
    the id of the state that the report is for. "" marks a whole report. It has all ``rows``, by key, and ``others`` has
    the rows of other replicas, by replica and key, as last known. Any other report has only the rows that changed since
    the last answered report, and the rows of its claims. ``version`` is the newest row of other replicas that the
    replica knows. ``series`` are its metrics, None if they were sent less than a second ago. ``adapters`` are all
    entries, if they changed; ``adapters_version`` is the version of the entries that the replica knows.
    """

    replica: str
    at: float
    incarnation: str = ""
    rows: Mapping[str, KeyUsage] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, KeyUsage]] = field(default_factory=dict)
    version: int = -1
    claims: tuple[Claim, ...] = ()
    series: tuple[Metric, ...] | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    adapters_version: int = -1


@dataclass(frozen=True, slots=True)
class StateReply:
    """The answer to a report.

    ``standings`` are the answers to the claims, in order. If ``standings`` is None, no claim was granted, and the
    replica must send a whole report with the claims. ``at`` is the state's clock in seconds. ``others`` are
    the rows of other replicas that changed since ``version`` of the report, by replica and key. ``adapters`` are all
    entries, None if the replica knows them.
    """

    incarnation: str
    at: float
    standings: tuple[Standing, ...] | None = None
    others: Mapping[str, Mapping[str, KeyUsage]] = field(default_factory=dict)
    version: int = -1
    adapters: tuple[AdapterEntry, ...] | None = None
    adapters_version: int = -1

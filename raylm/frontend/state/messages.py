"""What an ingress replica and the state actor tell each other, in one call at a time: StateReport, StateReply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raylm.messages import LoRAAdapter

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
    """What is asked of the limits of ``key``: to let one request in (``tokens`` None), or to serve so many tokens.

    It is held from when it is granted until it is settled. ``number`` is unique in its replica.
    """

    number: int
    key: str
    limits: KeyLimits
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """A claim of ``key`` has ended, with so many tokens served; what it held beyond them is given back."""

    number: int
    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What counted ``age_s`` seconds ago: one request (``tokens`` None), or tokens that were served by then."""

    key: str
    age_s: float
    tokens: int | None = None


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
class Holdings:
    """What a replica holds and has spent in the last minute: all that a state actor which is new to it must know."""

    claims: tuple[Claim, ...]
    spent: tuple[Spent, ...]


@dataclass(frozen=True, slots=True)
class StateReport:
    """What is new in one replica since its last report, which also says that it lives.

    ``incarnation`` is the state actor that the replica believes to speak to. To any other one it introduces itself:
    ``holdings`` then say everything. ``series`` are its metrics in Prometheus's text format, None if they were told a
    moment ago. ``adapters`` are entries that it has changed, ``adapters_version`` the set that it knows.
    """

    replica: str
    incarnation: str = ""
    holdings: Holdings | None = None
    settlements: tuple[Settlement, ...] = ()
    claims: tuple[Claim, ...] = ()
    series: bytes | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    adapters_version: int = -1


@dataclass(frozen=True, slots=True)
class StateReply:
    """``standings`` answer the claims, in their order; None if the replica must introduce itself first.

    ``adapters`` are all entries, None where the replica knows them.
    """

    incarnation: str
    standings: tuple[Standing, ...] | None = None
    adapters: tuple[AdapterEntry, ...] | None = None
    adapters_version: int = -1

"""Silences of clients after a fault: which fault caused a silence, and whether another process could have answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

AFTER_S = 10.0  # seconds after a fault in which a silence counts as its effect


@dataclass(frozen=True)
class Fault:
    """A process was killed ("death") or stopped ("stop"). ``others`` of its kind were serving.

    ``victim`` is the replica's name for an engine's processes, and the pid for an ingress.
    """

    at: float
    sort: str
    what: str
    victim: str
    others: frozenset[str]


@dataclass(frozen=True)
class Silence:
    """The longest silence of a stream between a fault and the next. ``covered`` if another process was serving.

    Without a ``fault`` no fault was near.
    """

    fault: Fault | None
    stream: int
    begin: float
    seconds: float
    covered: bool


def silences(faults: Sequence[Fault], streams: Sequence[Sequence[float]]) -> Iterator[Silence]:
    """For each fault, the silence of every stream open at the time. ``streams`` are the times of their parts, in order.

    A silence is covered if at least one of the ``others`` has no fault from this fault until the end of the silence.
    Then another process could have answered the whole time.
    """
    for place, fault in enumerate(faults):
        until = min([fault.at + AFTER_S, *(later.at for later in faults[place + 1 : place + 2])])
        for number, times in enumerate(streams):
            if not times[0] < fault.at < times[-1]:
                continue
            pairs = [pair for pair in pairwise(times) if pair[1] > fault.at and pair[0] < until]
            begin, end = max(pairs, key=lambda pair: pair[1] - pair[0])
            hit = {later.victim for later in faults[place + 1 :] if later.at < end}
            yield Silence(fault, number, begin, end - begin, bool(fault.others - hit))


def undisturbed(faults: Sequence[Fault], streams: Sequence[Sequence[float]]) -> Iterator[Silence]:
    """The longest silence of every stream without a fault near it."""
    for number, times in enumerate(streams):
        if not any(times[0] - AFTER_S < fault.at < times[-1] for fault in faults):
            begin, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
            yield Silence(None, number, begin, end - begin, True)

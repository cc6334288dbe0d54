"""How long clients heard nothing after a fault: which silences are its own, and whether another process was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

AFTER_S = 10.0  # in which a silence may come of a fault


@dataclass(frozen=True)
class Fault:
    """A process was killed ("death") or stopped ("stop") at a time; ``others`` of its sort served then.

    An engine's processes have the name of its replica as ``victim``, an ingress its pid.
    """

    at: float
    sort: str
    what: str
    victim: str
    others: frozenset[str]


@dataclass(frozen=True)
class Silence:
    """The longest one of a stream that began before the next fault; ``covered`` if another process was there.

    Without a ``fault`` none was near.
    """

    fault: Fault | None
    stream: int
    begin: float
    seconds: float
    covered: bool


def silences(faults: Sequence[Fault], streams: Sequence[Sequence[float]]) -> Iterator[Silence]:
    """After each fault one of every stream that was open then; ``streams`` are the times of their parts, in order.

    A silence is covered if at least one of the ``others`` is spared by all faults from its own to the end of the
    silence: then somebody could have answered all the time.
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
    """The longest silence of every stream that no fault came near."""
    for number, times in enumerate(streams):
        if not any(times[0] - AFTER_S < fault.at < times[-1] for fault in faults):
            begin, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
            yield Silence(None, number, begin, end - begin, True)

"""WaitingQueue: the sequences that wait, in the order of a scheduling policy; owned by the Scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from sortedcontainers import SortedList

from raylm.engine.sequence import Sequence

Rank = tuple[int, int, int]
Entry = tuple[float, int, int, Sequence]
AGING_S = 60.0  # seconds of waiting that make up for one class of priority


class Forecast(Protocol):
    """What is known of a sequence that waits, as far as it is."""

    def now(self) -> float:
        """Seconds since the epoch."""

    @property
    def num_steps(self) -> int:
        """Steps that were drawn up."""

    def free_places(self) -> int:
        """How many sequences more may run."""

    def cached_blocks(self, seq: Sequence) -> int:
        """How many blocks at its beginning are in the prefix cache."""

    def first_token_s(self, seq: Sequence) -> float:
        """Seconds until its first token if it starts now."""


class WaitingQueue:
    """First come, first served: all others wait behind the first one until it can start.

    Among the sequences that run the ``rank`` decides: lower is served earlier, and may preempt what is higher. It is
    one sequence's alone and never changes. Whoever comes back, preempted, stands where it stood before.
    """

    def __init__(self) -> None:
        self._line = SortedList()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        return (entry[-1] for entry in self._line)

    def rank(self, seq: Sequence) -> Rank:
        """(class, arrival, index)."""
        return (0, seq.state.arrival, seq.index)

    def push(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        self._line.add(self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        """A sequence waits no longer."""
        self._line.remove(self._entry(seq))

    def candidates(self) -> Iterator[Sequence]:
        """Who may start next, the best one first: the others in its place if it cannot. One at least must wait.

        The queue may change after an item was taken, and then no further one is asked for.
        """
        yield self._line[0][-1]

    @property
    def is_shared(self) -> bool:
        """Somebody else than who runs may come, and is not to wait long for the steps in flight."""
        return False

    def displaced(self) -> tuple[Sequence, Collection[Sequence]] | None:
        """Where no place is free: one that waits, and those that run of which one gives its place to it."""
        return None

    def invite(self, seq: Sequence) -> None:
        """One gives its place to this one, which is the first candidate until it has started."""

    def start(self, seq: Sequence, cached: int) -> None:
        """A sequence that waited runs from now on; ``cached`` of its tokens need not be computed."""
        self.remove(seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence runs no longer; its ``num_computed`` and tokens are still those of the batch."""

    def standing(self, seq: Sequence) -> float:
        """Of sequences that run the highest is preempted first."""
        return self.rank(seq)[0]

    def settle(self) -> None:
        """Called before ``standing`` is asked for."""

    def _entry(self, seq: Sequence) -> Entry:
        return (*self._key(seq), seq.state.arrival, seq.index, seq)

    def _key(self, seq: Sequence) -> tuple[float]:
        return (0.0,)


class PriorityQueue(WaitingQueue):
    """Lower classes first, of one class first come, first served; whoever has waited for AGING_S rises by a class."""

    def rank(self, seq: Sequence) -> Rank:
        return (seq.state.request.priority, seq.state.arrival, seq.index)

    def _key(self, seq: Sequence) -> tuple[float]:
        request = seq.state.request
        return (request.priority + request.arrival_time / AGING_S,)

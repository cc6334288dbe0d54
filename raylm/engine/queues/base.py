"""WaitingQueue: the waiting sequences, in the order of a scheduling policy. Owned by the Scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from sortedcontainers import SortedList

from raylm.engine.sequence import Sequence

Rank = tuple[int, int, int]
Entry = tuple[float, int, int, Sequence]
AGING_S = 60.0  # waiting this long raises a sequence by one priority class


class Forecast(Protocol):
    """Estimates that the scheduler gives to a queue."""

    def now(self) -> float:
        """Seconds since the epoch."""

    @property
    def num_steps(self) -> int:
        """Number of steps planned so far."""

    def free_places(self) -> int:
        """How many more sequences may run."""

    def cached_blocks(self, seq: Sequence) -> int:
        """Number of leading blocks of ``seq`` in the prefix cache."""

    def first_token_s(self, seq: Sequence) -> float:
        """Seconds until the first token of ``seq`` if it starts now."""


class WaitingQueue:
    """First come, first served: until the first sequence can start, no other sequence starts.

    ``rank`` orders the running sequences: a lower rank is served earlier and may preempt a higher rank. Ranks are
    unique and never change. A preempted sequence returns to its former place in the queue.
    """

    def __init__(self) -> None:
        self._line = SortedList()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        return (entry[-1] for entry in self._line)

    def rank(self, seq: Sequence) -> Rank:
        """(priority class, order of arrival, index in the request)."""
        return (0, seq.state.arrival, seq.index)

    def push(self, seq: Sequence) -> None:
        """Add a sequence to the queue."""
        self._line.add(self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that was aborted or starts."""
        self._line.remove(self._entry(seq))

    def candidates(self) -> Iterator[Sequence]:
        """The sequences that may start next, best first. A later candidate starts only if the earlier ones cannot.

        The queue must not be empty. The caller may change the queue after taking an item, and then takes no further
        item.
        """
        yield self._line[0][-1]

    @property
    def is_shared(self) -> bool:
        """Whether requests of another tenant may arrive and should not wait for long steps in flight."""
        return False

    def yielding(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Called before each step: the running sequences whose prompts get the tokens that all others leave."""
        return []

    def displaced(self) -> tuple[Sequence, Collection[Sequence]] | None:
        """Called when no place is free: (a waiting sequence, the running sequences of which one yields its place).

        None if no running sequence should yield.
        """
        return None

    def invite(self, seq: Sequence) -> None:
        """Make a sequence the first candidate until it starts. Another sequence was preempted for it."""

    def start(self, seq: Sequence, cached: int) -> None:
        """Move a waiting sequence out of the queue: it runs now, with ``cached`` tokens found in the prefix cache."""
        self.remove(seq)

    def leave(self, seq: Sequence) -> None:
        """Called when a sequence leaves the running batch, before its ``num_computed`` and tokens change."""

    def standing(self, seq: Sequence) -> float:
        """Order of preemption: the running sequence with the highest value is preempted first."""
        return self.rank(seq)[0]

    def settle(self) -> None:
        """Bring the values of ``standing`` up to date; called before them."""

    def _entry(self, seq: Sequence) -> Entry:
        return (*self._key(seq), seq.state.arrival, seq.index, seq)

    def _key(self, seq: Sequence) -> tuple[float]:
        return (0.0,)


class PriorityQueue(WaitingQueue):
    """Lower priority classes first; first come, first served within a class.

    Waiting for AGING_S seconds raises a sequence by one class.
    """

    def yielding(self, running: Iterable[Sequence]) -> list[Sequence]:
        if not self._line:
            return []
        first = self._key(self._line[0][-1])
        return [seq for seq in running if seq.has_prompt_left and self._key(seq) > first]

    def rank(self, seq: Sequence) -> Rank:
        return (seq.state.request.priority, seq.state.arrival, seq.index)

    def _key(self, seq: Sequence) -> tuple[float]:
        request = seq.state.request
        return (request.priority + request.arrival_time / AGING_S,)

"""WaitingQueue: the sequences that wait, in the order of a scheduling policy; owned by the Scheduler."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from raylm.engine.sequence import Sequence

Rank = tuple[int, int, int]


# (class, arrival, index): lower is served earlier; sequences of a higher class are preempted first.
POLICIES: dict[str, Callable[[Sequence], Rank]] = {
    "fcfs": lambda seq: (0, seq.state.arrival, seq.index),
    "priority": lambda seq: (seq.state.request.priority, seq.state.arrival, seq.index),
}


class WaitingQueue:
    """Sequences that wait, in the order of their rank; a policy is a rank.

    A rank is one sequence's alone and never changes. So a preempted sequence comes back before everything that arrived
    after it, and the same rank orders the running batch.
    """

    def __init__(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=self.rank)

    def peek(self) -> Sequence:
        """The sequence to be served next; the queue must not be empty."""
        return self._waiting[0]

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self._waiting, self.rank(seq), key=self.rank)
        assert self._waiting[place] is seq, "the sequence does not wait"
        del self._waiting[place]

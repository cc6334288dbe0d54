"""WaitingQueue: the sequences that wait, in the order of a scheduling policy; owned by the Scheduler."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from raylm.engine.sequence import Sequence

Rank = tuple[int, int, int]


def _first_come(seq: Sequence) -> Rank:
    return (0, seq.state.arrival, seq.index)


def _lowest_priority(seq: Sequence) -> Rank:
    return (seq.state.request.priority, seq.state.arrival, seq.index)


POLICIES: dict[str, Callable[[Sequence], Rank]] = {"fcfs": _first_come, "priority": _lowest_priority}
"""(class, arrival, index): lower is served earlier; sequences of a higher class are preempted first."""


class WaitingQueue:
    """Sequences that wait, in the order of their rank; a policy is a rank.

    A rank never changes while a sequence lives. So a preempted sequence comes back before everything that arrived
    after it, and the same rank orders the running batch. Removal marks; the heap is cleared of marked entries when
    they reach its head, or outnumber the others.
    """

    def __init__(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self._heap: list[tuple[Rank, int]] = []
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        self._waiting[seq.id] = seq
        heappush(self._heap, (self.rank(seq), seq.id))

    def peek(self) -> Sequence:
        """The sequence to be served next; the queue must not be empty."""
        while self._heap[0][1] not in self._waiting:
            heappop(self._heap)
        return self._waiting[self._heap[0][1]]

    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(self.rank(waiting), waiting.id) for waiting in self._waiting.values()]
            heapify(self._heap)

"""TimeLimits: the waiting requests in the order in which their time limits expire. Owned by the Scheduler."""

from __future__ import annotations

from sortedcontainers import SortedList

from raylm.engine.sequence import RequestState


class TimeLimits:
    """The requests with a time limit that have drawn no token and have no running sequence, earliest limit first.

    A request that has drawn a token continues beyond its limit: its client reads a stream, or closes the connection.
    """

    def __init__(self) -> None:
        self._line = SortedList()

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, state: RequestState) -> None:
        """Called when a sequence of the request begins to wait."""
        if (entry := _entry(state)) is not None and not state.has_drawn:
            self._line.add(entry)

    def leave(self, state: RequestState) -> None:
        """Called when a sequence of the request stops waiting."""
        if (entry := _entry(state)) is not None:
            self._line.discard(entry)

    def first_over(self, now: float) -> RequestState | None:
        """The request whose limit expired first, as of ``now`` (seconds since the epoch), or None."""
        while self._line and self._line[0][0] < now:
            state: RequestState = self._line[0][-1]
            if not state.has_drawn:
                return state
            del self._line[0]  # preempted while a step in flight drew its first token
        return None


def _entry(state: RequestState) -> tuple[float, int, RequestState] | None:
    """The sort entry of a request. Never changes, and is unique because the order of arrival is."""
    request = state.request
    timeout_s = request.service.timeout_s
    return None if timeout_s is None else (request.arrival_time + timeout_s, state.arrival, state)

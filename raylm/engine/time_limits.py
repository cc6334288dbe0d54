"""TimeLimits: until when the clients of waiting requests wait for an answer; owned by the Scheduler."""

from __future__ import annotations

from sortedcontainers import SortedList

from raylm.engine.sequence import RequestState


class TimeLimits:
    """The requests with a time limit of which no sequence runs and nothing was drawn, in the order of their ends.

    A request that has drawn a token goes on whatever its limit is: its client reads a stream, or hangs up by itself.
    """

    def __init__(self) -> None:
        self._line = SortedList()

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, state: RequestState) -> None:
        """A sequence of this request waits."""
        if (entry := _entry(state)) is not None and not state.has_drawn:
            self._line.add(entry)

    def leave(self, state: RequestState) -> None:
        """A sequence of this request waits no longer."""
        if (entry := _entry(state)) is not None:
            self._line.discard(entry)

    def first_over(self, now: float) -> RequestState | None:
        """The request whose limit was over first, at ``now`` in seconds since the epoch; None if there is none."""
        while self._line and self._line[0][0] < now:
            state: RequestState = self._line[0][-1]
            if not state.has_drawn:
                return state
            del self._line[0]  # it was preempted, and the step that was in flight has drawn its first token
        return None


def _entry(state: RequestState) -> tuple[float, int, RequestState] | None:
    """It never changes, and no two requests have the same arrival."""
    request = state.request
    timeout_s = request.service.timeout_s
    return None if timeout_s is None else (request.arrival_time + timeout_s, state.arrival, state)

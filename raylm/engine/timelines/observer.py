"""Observer: the interface by which the Scheduler reports events of sequences. EventRecorder emits SequenceEvents."""

from __future__ import annotations

import time
from collections.abc import Callable

from raylm.engine.sequence import Sequence
from raylm.messages import SequenceEvent, SequenceEventKind

Emit = Callable[[str, SequenceEvent], None]


class Observer:
    """Is called a few times in the life of a sequence, never for each token. This class ignores all events."""

    def scheduled(self, seq: Sequence, step: int, cached: int) -> None:
        """``seq`` joins the running batch, with ``cached`` of its tokens computed."""

    def drew(self, seq: Sequence, step: int) -> None:
        """``seq`` drew a token that the Scheduler checks. The first token after each start is always one of them."""

    def preempted(self, seq: Sequence, by: Sequence, step: int) -> None:
        """``seq`` is about to be preempted in favor of ``by``."""

    def ended(self, seq: Sequence, step: int) -> None:
        """``seq`` has ended, for any reason."""


class EventRecorder(Observer):
    """Calls ``emit`` with the client's id and the event."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._emit = emit
        self._clock = clock
        self._catching_up: set[int] = set()  # ids of sequences without a token since their start

    def scheduled(self, seq: Sequence, step: int, cached: int) -> None:
        self._catching_up.add(seq.id)
        self._tell(seq, "scheduled", step, cached)

    def drew(self, seq: Sequence, step: int) -> None:
        if seq.id in self._catching_up:
            self._catching_up.remove(seq.id)
            self._tell(seq, "token", step, len(seq.token_ids))

    def preempted(self, seq: Sequence, by: Sequence, step: int) -> None:
        self._catching_up.discard(seq.id)
        self._tell(seq, "preempted", step, seq.num_computed, by.state.request.request_id)

    def ended(self, seq: Sequence, step: int) -> None:
        self._catching_up.discard(seq.id)
        self._tell(seq, "ended", step, len(seq.token_ids))

    def request(self, client_id: str, key: int, kind: SequenceEventKind, step: int, waiting: int) -> None:
        """Record an event of a request that has no sequence yet."""
        self._emit(client_id, (key, 0, kind, self._clock(), step, waiting, ""))

    def _tell(self, seq: Sequence, kind: SequenceEventKind, step: int, tokens: int, by: str = "") -> None:
        self._emit(seq.client_id, (seq.key, seq.index, kind, self._clock(), step, tokens, by))

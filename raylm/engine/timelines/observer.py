"""Observer: what the Scheduler tells of its sequences' turns; EventRecorder makes SequenceEvents of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from raylm.engine.sequence import Sequence
from raylm.messages import SequenceEvent, SequenceEventKind

Emit = Callable[[str, SequenceEvent], None]


class Observer:
    """Told a few times in a sequence's life, never for each token. This one looks away."""

    def scheduled(self, seq: Sequence, step: int, cached: int) -> None:
        """It joins the running batch, where ``cached`` of its tokens are computed."""

    def drew(self, seq: Sequence, step: int) -> None:
        """It drew a token that is looked at; the first one since it was scheduled is among these."""

    def preempted(self, seq: Sequence, by: Sequence, step: int) -> None:
        """It is about to lose its blocks to ``by``."""

    def ended(self, seq: Sequence, step: int) -> None:
        """It is over, however it ended."""


class EventRecorder(Observer):
    """Hands each event to ``emit`` with the client's id."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._emit = emit
        self._clock = clock
        self._catching_up: set[int] = set()  # scheduled, and without a token since

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
        """Something happened to a request that has no sequence yet."""
        self._emit(client_id, (key, 0, kind, self._clock(), step, waiting, ""))

    def _tell(self, seq: Sequence, kind: SequenceEventKind, step: int, tokens: int, by: str = "") -> None:
        self._emit(seq.client_id, (seq.key, seq.index, kind, self._clock(), step, tokens, by))

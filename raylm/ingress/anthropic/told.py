"""Told: the progress of a message's stream, encoded in the ids of events, and the removal of repeated content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.errors import InvalidRequestError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.sse import named_event
from raylm.ingress.http.stream_ids import (
    FINISH,
    FIRST_OPENING,
    LAST_EVENT_ID,
    MOST_STATE,
    NOTHING,
    OPEN,
    UNRESUMABLE,
    StreamId,
)

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta

# The fields of a StreamId in place of states of choices: the phase; the number of blocks begun, and the kind of the
# open block; the characters of thinking and of text; the number of calls begun, and the characters of the last call's
# arguments.
STATES = 7
_PHASE, _BLOCKS, _OPEN_KIND, _THINKING, _TEXT, _CALLS, _ARGUMENTS = range(STATES)
_PHASES = {"message_start": FIRST_OPENING, "ping": OPEN, "message_delta": FINISH, "message_stop": FINISH}
_SIGNED = "signed thinking"  # the kind of a thinking block between its signature and its end
_KINDS = (None, "thinking", "text", "tool_use", _SIGNED)
_COUNTED = {
    "thinking_delta": (_THINKING, "thinking"),
    "text_delta": (_TEXT, "text"),
    "input_json_delta": (_ARGUMENTS, "partial_json"),
}


class Told:
    """Counts the content sent, and removes content that an earlier connection sent from a regenerated answer.

    It counts characters, separately for each kind, because deltas merge while a client reads slowly.

    Raises:
        InvalidRequestError: the counts of a ``stream_id`` are impossible for a message.
    """

    def __init__(self, stream_id: StreamId = UNRESUMABLE) -> None:
        self._id = stream_id
        self._was = was = stream_id.was or (NOTHING,) * STATES
        self._counts, self._left = list(was), list(was)
        if was[_OPEN_KIND] >= len(_KINDS) or was[_PHASE] not in (NOTHING, *_PHASES.values()) or MOST_STATE in was:
            raise _more_than_there_is()

    @property
    def blocks(self) -> int:
        return self._was[_BLOCKS]

    @property
    def open_kind(self) -> str | None:
        return _KINDS[self._was[_OPEN_KIND]]

    @property
    def calls(self) -> int:
        return self._was[_CALLS]

    @property
    def openings(self) -> int:
        """The number of opening events, of two, that were sent."""
        return self._id.openings_told(0, 2)

    @property
    def ended(self) -> bool:
        """Whether only the last event remains to be sent."""
        return self._was[_PHASE] == FINISH

    def cut(self, delta: CompletionDelta) -> None:
        """Remove the content that was sent before from ``delta``."""
        if self._was[_PHASE] == NOTHING:
            return
        delta.reasoning = self._rest(_THINKING, delta.reasoning)
        delta.text = self._rest(_TEXT, delta.text)
        calls = [call for call in delta.tool_calls or () if call.index >= self.calls - 1]
        for call in calls:
            if call.index == self.calls - 1:
                call.arguments = self._rest(_ARGUMENTS, call.arguments)
        delta.tool_calls = calls
        if delta.finish_reason is not None and any(self._left[place] for place, _ in _COUNTED.values()):
            raise _more_than_there_is()

    def _rest(self, place: int, text: str) -> str:
        told = min(self._left[place], len(text))
        self._left[place] -= told
        return text[told:]

    def encode(self, event: JSONObject) -> bytes:
        """The event with an id that encodes the progress of the message."""
        kind = event["type"]
        if kind == "content_block_delta" and event["delta"]["type"] == "signature_delta":
            self._reach(_OPEN_KIND, _KINDS.index(_SIGNED))
        elif kind == "content_block_delta":
            place, field = _COUNTED[event["delta"]["type"]]
            self._reach(place, self._counts[place] + len(event["delta"][field]))
        elif kind == "content_block_start":
            block = event["content_block"]["type"]
            self._reach(_BLOCKS, self._counts[_BLOCKS] + 1)
            self._reach(_OPEN_KIND, _KINDS.index(block))
            if block == "tool_use":
                self._reach(_CALLS, self._counts[_CALLS] + 1)
                self._reach(_ARGUMENTS, 0)
        elif kind == "content_block_stop":
            self._reach(_OPEN_KIND, 0)
        else:
            self._reach(_PHASE, _PHASES[kind])
        return self._id.line() + named_event(event)

    def _reach(self, place: int, count: int) -> None:
        self._counts[place] = count
        self._id.reach(place, min(count, MOST_STATE))


def _more_than_there_is() -> InvalidRequestError:
    return InvalidRequestError("This event is beyond the end of the answer.", param=LAST_EVENT_ID)

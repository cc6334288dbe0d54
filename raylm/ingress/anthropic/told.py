"""Told: how far the events of a message have told it, as their ids say it, and what of it is not told again."""

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

# What a StreamId has in place of the states of choices: the phase; how many blocks were begun, and the kind of the open
# one; characters of thoughts and of text; how many calls were begun, and characters of the last one's arguments.
STATES = 7
_PHASE, _BLOCKS, _OPEN_KIND, _THINKING, _TEXT, _CALLS, _ARGUMENTS = range(STATES)
_PHASES = {"message_start": FIRST_OPENING, "ping": OPEN, "message_delta": FINISH, "message_stop": FINISH}
_SIGNED = "signed thinking"  # what a block of thoughts is between its signature and its end
_KINDS = (None, "thinking", "text", "tool_use", _SIGNED)
_COUNTED = {
    "thinking_delta": (_THINKING, "thinking"),
    "text_delta": (_TEXT, "text"),
    "input_json_delta": (_ARGUMENTS, "partial_json"),
}


class Told:
    """Counts what is told, and takes out of an answer that is made again what was told before the stream began.

    Characters are counted and not deltas, which merge where a client reads slowly; those of each kind by themselves.

    Raises:
        InvalidRequestError: the counts of a ``stream_id`` cannot be those of a message.
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
        """How many of the two events before all content."""
        return self._id.openings_told(0, 2)

    @property
    def ended(self) -> bool:
        """Whether no more than the last event is left to tell."""
        return self._was[_PHASE] == FINISH

    def cut(self, delta: CompletionDelta) -> None:
        """Leave what was not told, in place."""
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
        """The event with the id that says how far the message is told by it."""
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
    return InvalidRequestError("More was told than there is of this answer.", param=LAST_EVENT_ID)

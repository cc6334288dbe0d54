"""MessageBlocks: the content blocks of one of Anthropic's messages as they grow, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from raylm.ingress.http.body import JSONObject

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, ToolCallDelta

Events = list[JSONObject]

# What a block begins as, which of its fields grows, and the event of a piece of it.
_EMPTY: dict[str, JSONObject] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "tool_use": {"type": "tool_use", "id": "", "name": "", "input": {}},
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageBlocks:
    """Reasoning, text and calls, each a block that is started, grows, and is stopped before the next one starts.

    ``blocks`` are whole once they are stopped.
    """

    def __init__(self) -> None:
        self.blocks: list[JSONObject] = []
        self._pieces: list[str] = []
        self._kind: str | None = None
        self._call = -1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                events += [] if self._kind == kind else self._start(kind)
                events.append(self._grow(text))
        for call in delta.tool_calls or ():
            events += self._add_call(call)
        return events

    def finish(self) -> Events:
        """Stop what is open."""
        if self._kind is None:
            return []
        kind, text, block = self._kind, "".join(self._pieces), self.blocks[-1]
        self._kind, self._pieces = None, []
        if kind == "tool_use":
            block["input"] = _as_object(text)
        else:
            block[_DELTAS[kind][1]] = text
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _add_call(self, call: ToolCallDelta) -> Events:
        events: Events = []
        if call.index != self._call:
            self._call = call.index
            events = self._start("tool_use", id=call.id, name=call.name)
        return [*events, self._grow(call.arguments)] if call.arguments else events

    def _start(self, kind: str, **fields: object) -> Events:
        events = self.finish()
        self._kind = kind
        self.blocks.append(_EMPTY[kind] | fields)
        shown = dict(self.blocks[-1])
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": shown}]

    def _grow(self, piece: str) -> JSONObject:
        assert self._kind is not None
        self._pieces.append(piece)
        kind, field = _DELTAS[self._kind]
        return {
            "type": "content_block_delta",
            "index": len(self.blocks) - 1,
            "delta": {"type": kind, field: piece},
        }


def _as_object(arguments: str) -> JSONObject:
    """A call's arguments; those that max_tokens cut off are none."""
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}

"""MessageBlocks: builds the content blocks of a message in Anthropic's API, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.frontend import read_arguments
from raylm.ingress.http.body import JSONObject

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta
    from raylm.ingress.anthropic.told import Told

Events = list[JSONObject]

# RayLM does not sign thinking, but clients that send it back need a non-empty signature. It is not read.
SIGNATURE = "unsigned"

# The first content of a block, the type of its deltas, and the field of a delta.
_KINDS: dict[str, tuple[JSONObject, str, str]] = {
    "thinking": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "text": ({"type": "text", "text": "", "citations": None}, "text_delta", "text"),
    "tool_use": (
        {"type": "tool_use", "id": "", "name": "", "input": {}, "caller": {"type": "direct"}},
        "input_json_delta",
        "partial_json",
    ),
}


class MessageBlocks:
    """Builds blocks of thinking, text and tool calls. A block is started, extended, and stopped before the next.

    ``blocks`` are complete when they are stopped. Blocks that were ``told`` before are omitted.
    """

    def __init__(self, told: Told) -> None:
        self.blocks: list[JSONObject] = []
        self._pieces: list[str] = []
        self._num_told = told.blocks
        self._kind = told.open_kind  # of the open block, which is the last one
        self._call = told.calls - 1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                events += [] if self._kind == kind else self._start(kind)
                events.append(self._grow(text))
        for call in delta.tool_calls or ():
            if call.index != self._call:
                self._call = call.index
                events += self._start("tool_use", id=call.id, name=call.name)
            if call.arguments:
                events.append(self._grow(call.arguments))
        return events

    def finish(self) -> Events:
        """Stop the open block."""
        if self._kind is None:
            return []
        text = "".join(self._pieces)
        kind, self._kind = self._kind, None
        events = []
        if kind == "thinking":
            events.append(self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE}))
        if self.blocks and kind in _KINDS:
            _, _, field = _KINDS[kind]
            self.blocks[-1] |= {"input": read_arguments(text)} if kind == "tool_use" else {field: text}
            if kind == "thinking":
                self.blocks[-1]["signature"] = SIGNATURE
        return [*events, self._event("stop")]

    def _start(self, kind: str, **fields: object) -> Events:
        events = self.finish()
        self._kind, self._pieces = kind, []
        self.blocks.append(_KINDS[kind][0] | fields)
        return [*events, self._event("start", content_block=dict(self.blocks[-1]))]

    def _grow(self, piece: str) -> JSONObject:
        assert self._kind is not None
        self._pieces.append(piece)
        _, kind, field = _KINDS[self._kind]
        return self._event("delta", delta={"type": kind, field: piece})

    def _event(self, kind: str, **fields: object) -> JSONObject:
        return {"type": f"content_block_{kind}", "index": self._num_told + len(self.blocks) - 1} | fields

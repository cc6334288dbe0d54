"""ResponseItems: the output items of one response as they grow, and the events that report every change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.responses.input import new_id

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, ToolCallDelta

Events = list[JSONObject]


class ResponseItems:
    """Reasoning, text and calls, each an item that is opened, grows, and is closed before the next one opens.

    Events lack their sequence_number: the sender counts it.
    """

    def __init__(self, tokens: TokenTexts, *, with_logprobs: bool) -> None:
        self.items: list[JSONObject] = []
        self._tokens = tokens
        self._with_logprobs = with_logprobs
        self._logprobs: list[JSONObject] = []  # of tokens whose text is still to come
        self._open: _OpenItem | None = None
        self._call = -1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        if self._with_logprobs:
            entries = (delta.logprobs or [])[delta.reasoning_tokens :]
            self._logprobs += chat_logprobs(entries, self._tokens)["content"].values
        if delta.reasoning:
            events += self._ensure(_OpenReasoning)
            events += self._grow(delta.reasoning)
        if delta.text:
            events += self._ensure(_OpenMessage)
            events += self._grow(delta.text)
        for call in delta.tool_calls or ():
            events += self._add_call(call)
        return events

    def finish(self, status: str) -> Events:
        """Close what is open, as ``completed`` or ``incomplete``; an answer of nothing is an empty message."""
        events = [] if self.items else self._ensure(_OpenMessage)
        return events + self._close(status)

    def _add_call(self, call: ToolCallDelta) -> Events:
        events: Events = []
        if call.index != self._call:
            self._call = call.index
            events += self._close("completed")
            opened = _OpenCall(len(self.items), call.id or "", call.name or "")
            events += self._begin(opened)
        return events + (self._grow(call.arguments) if call.arguments else [])

    def _ensure(self, kind: type[_OpenReasoning | _OpenMessage]) -> Events:
        if isinstance(self._open, kind):
            return []
        return self._close("completed") + self._begin(kind(len(self.items)))

    def _begin(self, opened: _OpenItem) -> Events:
        self._open = opened
        self.items.append(opened.item)
        return opened.begin()

    def _grow(self, piece: str) -> Events:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        return [self._open.grow(piece, logprobs)]

    def _close(self, status: str) -> Events:
        opened, self._open = self._open, None
        return [] if opened is None else opened.end(status, self._logprobs)


class _OpenItem(ABC):
    """An item that grows; ``item`` is what clients get, brought up to date when it ends."""

    item: JSONObject

    def __init__(self, index: int) -> None:
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> Events:
        return [{"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}]

    @abstractmethod
    def grow(self, piece: str, logprobs: list[JSONObject]) -> JSONObject:
        """The event of a new piece."""

    def end(self, status: str, logprobs: list[JSONObject]) -> Events:
        self.item["status"] = status
        return [{"type": "response.output_item.done", "output_index": self._index, "item": self.item}]

    def _event(self, kind: str, **fields: object) -> JSONObject:
        return {"type": kind, "item_id": self.item["id"], "output_index": self._index, **fields}


class _OpenPart(_OpenItem):
    """An item with one part of text."""

    text_events: str
    part_kind: str

    def begin(self) -> Events:
        added = self._event("response.content_part.added", content_index=0, part=self._part("", []))
        return [*super().begin(), added]

    def _part(self, text: str, logprobs: list[JSONObject]) -> JSONObject:
        return {"type": self.part_kind, "text": text}

    def _done(self, text: str, logprobs: list[JSONObject]) -> JSONObject:
        return self._event(f"{self.text_events}.done", content_index=0, text=text)

    def _finish(self, status: str, logprobs: list[JSONObject]) -> Events:
        text = "".join(self._pieces)
        part = self._part(text, logprobs)
        self.item["content"] = [part]
        done = [self._done(text, logprobs), self._event("response.content_part.done", content_index=0, part=part)]
        return done + super().end(status, logprobs)


class _OpenReasoning(_OpenPart):
    text_events = "response.reasoning_text"
    part_kind = "reasoning_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item = {"id": new_id("reasoning"), "type": "reasoning", "summary": [], "status": "in_progress"}

    def grow(self, piece: str, logprobs: list[JSONObject]) -> JSONObject:
        self._pieces.append(piece)
        return self._event(f"{self.text_events}.delta", content_index=0, delta=piece)

    def end(self, status: str, logprobs: list[JSONObject]) -> Events:
        return self._finish(status, [])


class _OpenMessage(_OpenPart):
    text_events = "response.output_text"
    part_kind = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        head = {"id": new_id("message"), "type": "message", "role": "assistant"}
        self.item = head | {"content": [], "status": "in_progress"}
        self._logprobs: list[JSONObject] = []

    def grow(self, piece: str, logprobs: list[JSONObject]) -> JSONObject:
        self._pieces.append(piece)
        self._logprobs += logprobs
        return self._event(f"{self.text_events}.delta", content_index=0, delta=piece, logprobs=_without_bytes(logprobs))

    def end(self, status: str, logprobs: list[JSONObject]) -> Events:
        return self._finish(status, self._logprobs + logprobs)

    def _part(self, text: str, logprobs: list[JSONObject]) -> JSONObject:
        return {"type": self.part_kind, "text": text, "annotations": [], "logprobs": logprobs}

    def _done(self, text: str, logprobs: list[JSONObject]) -> JSONObject:
        return super()._done(text, logprobs) | {"logprobs": _without_bytes(logprobs)}


class _OpenCall(_OpenItem):
    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        head = {"id": new_id("function_call"), "type": "function_call", "status": "in_progress"}
        self.item = head | {"call_id": call_id, "name": name, "arguments": ""}

    def grow(self, piece: str, logprobs: list[JSONObject]) -> JSONObject:
        self._pieces.append(piece)
        return self._event("response.function_call_arguments.delta", delta=piece)

    def end(self, status: str, logprobs: list[JSONObject]) -> Events:
        arguments = self.item["arguments"] = "".join(self._pieces)
        name = self.item["name"]
        done = self._event("response.function_call_arguments.done", name=name, arguments=arguments)
        return [done, *super().end(status, logprobs)]


def _without_bytes(logprobs: Iterable[JSONObject]) -> list[JSONObject]:
    """In events log-probabilities have no bytes, by OpenAI's specification."""
    return [
        {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": _tops(entry["top_logprobs"])}
        for entry in logprobs
    ]


def _tops(entries: list[JSONObject]) -> list[JSONObject]:
    return [{"token": entry["token"], "logprob": entry["logprob"]} for entry in entries]

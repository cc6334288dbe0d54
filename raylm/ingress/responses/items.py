"""ResponseItems: the output items of one response as they grow, and the events that report every change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.responses.input import new_id, text_part

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta

Events = list[JSONObject]

# What an item begins as, beside its id, type and status.
_EMPTY: dict[str, JSONObject] = {
    "reasoning": {"summary": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"call_id": "", "name": "", "arguments": ""},
}
# What grows in an item, as its events call it: the arguments of a call, else its one part.
_PIECES = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


class ResponseItems:
    """Reasoning, text and calls, each an item that is opened, grows, and is closed before the next one opens.

    ``items`` are brought up to date when they are closed. Events lack their sequence_number: the sender counts it.
    """

    def __init__(self, tokens: TokenTexts, *, with_logprobs: bool) -> None:
        self.items: list[JSONObject] = []
        self._tokens = tokens
        self._with_logprobs = with_logprobs
        self._pending: list[JSONObject] = []  # log-probabilities of tokens whose text is still to come
        self._kind: str | None = None  # of the open item, which is the last one
        self._pieces: list[str] = []
        self._logprobs: list[JSONObject] = []
        self._call = -1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        if self._with_logprobs:
            entries = (delta.logprobs or [])[delta.reasoning_tokens :]
            self._pending += chat_logprobs(entries, self._tokens)["content"].values
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                events += [] if self._kind == kind else self._open(kind)
                events.append(self._grow(text))
        for call in delta.tool_calls or ():
            if call.index != self._call:
                self._call = call.index
                events += self._open("function_call", call_id=call.id or "", name=call.name or "")
            if call.arguments:
                events.append(self._grow(call.arguments))
        return events

    def finish(self, status: str) -> Events:
        """Close what is open, as ``completed`` or ``incomplete``; an answer of nothing is an empty message."""
        return ([] if self.items else self._open("message")) + self._close(status)

    def _open(self, kind: str, **fields: str) -> Events:
        events = self._close("completed")
        self._kind, self._pieces, self._logprobs = kind, [], []
        item = {"id": new_id(kind), "type": kind, "status": "in_progress"} | _EMPTY[kind] | fields
        self.items.append(item)
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)})
        if kind != "function_call":
            events.append(self._event("content_part.added", part=text_part(_PIECES[kind], "")))
        return events

    def _grow(self, piece: str) -> JSONObject:
        assert self._kind is not None
        self._pieces.append(piece)
        event = self._event(f"{_PIECES[self._kind]}.delta", delta=piece)
        if self._kind == "message":
            self._logprobs += self._pending
            event["logprobs"] = _without_bytes(self._pending)
        self._pending = []
        return event

    def _close(self, status: str) -> Events:
        if self._kind is None:
            return []
        item, text, piece = self.items[-1], "".join(self._pieces), _PIECES[self._kind]
        if self._kind == "function_call":
            item["arguments"] = text
            events = [self._event(f"{piece}.done", name=item["name"], arguments=text)]
        else:
            logprobs = self._logprobs + self._pending
            part = text_part(piece, text, logprobs)
            item["content"] = [part]
            shown = {"logprobs": _without_bytes(logprobs)} if self._kind == "message" else {}
            done = self._event(f"{piece}.done", text=text, **shown)
            events = [done, self._event("content_part.done", part=part)]
        item["status"] = status
        self._kind = None
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **fields: object) -> JSONObject:
        place = {} if self._kind == "function_call" else {"content_index": 0}
        head = {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return head | place | fields


def _without_bytes(logprobs: list[JSONObject]) -> list[JSONObject]:
    """In events log-probabilities have no bytes, by OpenAI's specification."""
    return [_bare(entry) | {"top_logprobs": [_bare(top) for top in entry["top_logprobs"]]} for entry in logprobs]


def _bare(entry: JSONObject) -> JSONObject:
    return {"token": entry["token"], "logprob": entry["logprob"]}

"""ResponseItems: the output items of one response, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.responses.input import CALLS, item_id, made_call_id, mcp_item, text_part
from raylm.ingress.responses.tools import CallableTool, text_of

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta

Events = list[JSONObject]

# The first content of an item, besides its id, type and status.
_EMPTY: dict[str, JSONObject] = {
    "reasoning": {"summary": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"call_id": "", "name": "", "arguments": ""},
    "custom_tool_call": {"call_id": "", "name": "", "input": ""},
    "mcp_call": {"arguments": "", "output": None, "error": None, "approval_request_id": None},
    "mcp_approval_request": {"arguments": ""},
}
# The names, in events, of the growing content of an item: the arguments of a call, or its single part.
_PIECES = {
    "reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input", "mcp_call": "mcp_call_arguments",
    "mcp_approval_request": "",
}  # fmt: skip
_WITHOUT_PARTS = {*CALLS, "mcp_call", "mcp_approval_request"}


class ResponseItems:
    """Builds items of reasoning, text and calls. An item is opened, extended, and closed before the next.

    ``items`` are updated when they are closed. Their ids are the same if a response is generated again. ``pending`` are
    the places of calls of MCP servers that are still to be made, and ``waits`` says whether the client has something to
    do before the model can go on. Events have no sequence_number; the sender adds it. With ``seal`` reasoning also has
    encrypted content. ``tools`` are those of the request, by the names of their functions.
    """

    def __init__(
        self,
        response_id: str,
        tokens: TokenTexts,
        tools: Mapping[str, CallableTool],
        *,
        with_logprobs: bool,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self._response_id = response_id
        self._seal = seal
        self.items: list[JSONObject] = []
        self.pending: list[int] = []
        self.waits = False
        self._tokens = tokens
        self._tools = tools
        self._with_logprobs = with_logprobs
        self._kind: str | None = None  # of the open item, which is the last one
        self._pieces: list[str] = []
        self._logprobs: list[JSONObject] = []
        self._call = -1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                events += [] if self._kind == kind else self._open(kind)
                events.append(self._grow(text, delta))
        for call in delta.tool_calls or ():
            if call.index != self._call:
                self._call = call.index
                events += self._open_call(made_call_id(self._response_id, call.index), call.name or "")
            if call.arguments and self._kind == "custom_tool_call":
                self._pieces.append(call.arguments)  # JSON, whose text is sent when it is complete
            elif call.arguments and self._kind == "mcp_approval_request":
                self._pieces.append(call.arguments)  # the item is sent when it is complete
            elif call.arguments:
                events.append(self._grow(call.arguments, delta))
        return events

    def finish(self, status: str, *, fills: bool = True) -> Events:
        """Close the open item as ``completed`` or ``incomplete``. An empty answer gets an empty message if ``fills``.

        Calls that are still to be made are incomplete.
        """
        is_empty = fills and not any(item["type"] != "mcp_list_tools" for item in self.items)
        events = (self._open("message") if is_empty else []) + self._close(status)
        for place in self.pending:
            self.items[place]["status"] = "incomplete"
            events.append(self._done(place))
        self.pending = []
        return events

    def end_round(self) -> Events:
        """Close the open item of an answer after which calls are made."""
        self._call = -1
        return self._close("completed")

    def add_list(self, label: str, tools: list[JSONObject]) -> Events:
        """Add the tools of an MCP server."""
        place = len(self.items)
        made = item_id("mcp_list_tools", self._response_id, place)
        item = mcp_item("mcp_list_tools", {"server_label": label, "tools": tools}, made)
        self.items.append(item)
        where = {"item_id": made, "output_index": place}
        return [
            {"type": "response.output_item.added", "output_index": place, "item": item | {"tools": []}},
            {"type": "response.mcp_list_tools.in_progress"} | where,
            {"type": "response.mcp_list_tools.completed"} | where,
            self._done(place),
        ]

    def add_approved(self, asked: JSONObject) -> Events:
        """Add a call that the client has approved; ``asked`` is the item with the request for approval."""
        named = {name: asked[name] for name in ("server_label", "name")}
        events = self._open("mcp_call", **named, approval_request_id=asked["id"])
        self._pieces = [asked["arguments"]]
        return [*events, self._event("mcp_call_arguments.delta", delta=asked["arguments"]), *self._close("completed")]

    def end_call(self, output: str | None, error: JSONObject | None) -> Events:
        """End the first pending call."""
        place = self.pending.pop(0)
        item = self.items[place]
        status = "completed" if error is None else "failed"
        item |= {"output": output, "error": error, "status": status}
        ended = {"type": f"response.mcp_call.{status}", "item_id": item["id"], "output_index": place}
        return [ended, self._done(place)]

    def _done(self, place: int) -> JSONObject:
        return {"type": "response.output_item.done", "output_index": place, "item": dict(self.items[place])}

    def _open_call(self, call_id: str, function: str) -> Events:
        tool = self._tools.get(function)
        if tool is None:
            return self._open("function_call", call_id=call_id, name=function)
        if tool.server is not None:
            label = tool.server["server_label"]
            kind = "mcp_approval_request" if tool.needs_approval else "mcp_call"
            return self._open(kind, server_label=label, name=tool.tool["name"])
        named = {"name": tool.tool["name"]} | ({} if tool.namespace is None else {"namespace": tool.namespace})
        return self._open("custom_tool_call" if tool.is_custom else "function_call", call_id=call_id, **named)

    def _open(self, kind: str, **fields: str) -> Events:
        events = self._close("completed")
        self._kind, self._pieces, self._logprobs = kind, [], []
        made = item_id(kind, self._response_id, len(self.items))
        item = {"id": made, "type": kind, "status": "in_progress"} | _EMPTY[kind] | fields
        self.items.append(item)
        if kind == "mcp_approval_request":
            del item["status"]
            return events
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)})
        if kind == "mcp_call":
            events.append(self._event("mcp_call.in_progress"))
        elif kind not in CALLS:
            events.append(self._event("content_part.added", part=text_part(_PIECES[kind], "")))
        return events

    def _grow(self, piece: str, delta: CompletionDelta) -> JSONObject:
        assert self._kind is not None
        self._pieces.append(piece)
        event = self._event(f"{_PIECES[self._kind]}.delta", delta=piece)
        if self._kind == "message":
            entries = (delta.text_logprobs or ()) if self._with_logprobs else ()
            logprobs = list(chat_logprobs(entries, self._tokens)["content"].values)
            self._logprobs += logprobs
            event["logprobs"] = _without_bytes(logprobs)
        return event

    def _close(self, status: str) -> Events:
        if self._kind is None:
            return []
        item, text, piece = self.items[-1], "".join(self._pieces), _PIECES[self._kind]
        self.waits |= self._kind in (*CALLS, "mcp_approval_request")
        if self._kind in ("mcp_call", "mcp_approval_request"):
            return self._close_mcp(item, text, status)
        if self._kind == "function_call":
            item["arguments"] = text
            events = [self._event(f"{piece}.done", name=item["name"], arguments=text)]
        elif self._kind == "custom_tool_call":
            item["input"] = text = text_of(text)
            events = [self._event(f"{piece}.delta", delta=text)] if text else []
            events.append(self._event(f"{piece}.done", input=text))
        else:
            part = text_part(piece, text, self._logprobs)
            item["content"] = [part]
            if self._kind == "reasoning" and self._seal is not None:
                item["encrypted_content"] = self._seal(text)
            shown = {"logprobs": _without_bytes(self._logprobs)} if self._kind == "message" else {}
            done = self._event(f"{piece}.done", text=text, **shown)
            events = [done, self._event("content_part.done", part=part)]
        item["status"] = status
        self._kind = None
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _close_mcp(self, item: JSONObject, arguments: str, status: str) -> Events:
        """Close a call that the server makes later, or a request for approval, which is sent now if it is complete."""
        kind, self._kind = self._kind, None
        item["arguments"] = arguments
        place = len(self.items) - 1
        if kind == "mcp_call":
            done = {"type": "response.mcp_call_arguments.done", "item_id": item["id"], "output_index": place}
            if status == "completed":
                self.pending.append(place)
                return [done | {"arguments": arguments}]
            item["status"] = status
            return [done | {"arguments": arguments}, self._done(place)]
        if status != "completed":
            self.items.pop()
            return []
        return [{"type": "response.output_item.added", "output_index": place, "item": dict(item)}, self._done(place)]

    def _event(self, kind: str, **fields: object) -> JSONObject:
        place = {} if self._kind in _WITHOUT_PARTS else {"content_index": 0}
        head = {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return head | place | fields


def _without_bytes(logprobs: list[JSONObject]) -> list[JSONObject]:
    """Remove bytes from log-probabilities, which events do not have in OpenAI's specification."""
    return [_bare(entry) | {"top_logprobs": [_bare(top) for top in entry["top_logprobs"]]} for entry in logprobs]


def _bare(entry: JSONObject) -> JSONObject:
    return {"token": entry["token"], "logprob": entry["logprob"]}

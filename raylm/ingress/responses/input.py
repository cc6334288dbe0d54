"""Items of the Responses API: assigns ids to input items, and converts items to chat messages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import OneOf, past, refuse, without_others, wrong
from raylm.ingress.responses.tools import arguments_of, function_name

MAX_ITEMS = 4096
SUMMARIZE = (
    "Summarize our conversation so far, so that it can go on from the summary alone: my requests, what was done, "
    "decisions and their reasons, names of files and exact values that are still needed, and what is left to do."
)
"""The user's message that a summary answers."""
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs", "compaction": "cmp", "mcp_list_tools": "mcpl",
    "mcp_call": "mcp", "mcp_approval_request": "mcpr", "mcp_approval_response": "mcpa",
}  # fmt: skip
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The types of calls, and the field with what the tool is given."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_MCP_FIELDS = {
    "mcp_list_tools": ("server_label", "tools"),
    "mcp_call": ("server_label", "name", "arguments", "output", "error", "approval_request_id"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
    "mcp_approval_response": ("approval_request_id", "approve", "reason"),
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9]{1,6}")
_REFERENCE = "item_reference"

Ignored: TypeAlias = Any
"""A field of output items without effect when they are sent back as history."""


@past("input[].content[]")
class TextPart(TypedDict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: NotRequired[Ignored]
    logprobs: NotRequired[Ignored]


@past("input[].content[]")
class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


_ONLY_TEXT = OneOf("parts of type {got} are not supported; only text is.", key="type", served=False)
Part = Annotated[TextPart | RefusalPart, _ONLY_TEXT]
_TEXT_OR_PARTS = OneOf("expected a string or an array of text parts, but got {got}")
Content = Annotated[str | Annotated[list[Part], Field(min_length=1, fail_fast=True)], _TEXT_OR_PARTS]
Summary = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], _TEXT_OR_PARTS]


class _Item(TypedDict):
    id: NotRequired[str | None]
    status: NotRequired[Ignored]


@past("input[]")
class MessageItem(_Item):
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    phase: NotRequired[Ignored]


@past("input[]")
class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str | None]


@past("input[]")
class CustomToolCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str | None]


@past("input[]")
class ToolOutputItem(_Item):
    """The output of a call. Codex also sends outputs of tools of its own that no model called, with their name."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NotRequired[str | None]
    name: NotRequired[str | None]
    namespace: NotRequired[str | None]
    output: Content


def _has_a_source(item: ToolOutputItem) -> ToolOutputItem:
    if item.get("call_id") is None and not item.get("name"):
        raise refuse("expected the id of a call", at="call_id")
    return item


@past("input[]")
class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: NotRequired[Summary | None]
    content: NotRequired[Summary | None]
    encrypted_content: NotRequired[str | None]


@past("input[]")
class CompactionItem(_Item):
    """A summary in place of the conversation before it, as /v1/responses/compact returns it."""

    type: Literal["compaction"]
    encrypted_content: str


@past("input[].tools[]")
class ListedTool(TypedDict):
    name: str
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    annotations: NotRequired[dict[str, Any] | None]


@past("input[]")
class McpListItem(TypedDict):
    """The tools of an MCP server, which is not asked again for them."""

    type: Literal["mcp_list_tools"]
    id: NotRequired[str | None]
    server_label: str
    tools: Annotated[list[Annotated[ListedTool, without_others(ListedTool)]], Field(max_length=1024, fail_fast=True)]
    error: NotRequired[Ignored]


@past("input[]")
class McpCallItem(_Item):
    type: Literal["mcp_call"]
    server_label: str
    name: str
    arguments: str
    output: NotRequired[str | None]
    error: NotRequired[Any]
    approval_request_id: NotRequired[str | None]


@past("input[]")
class McpApprovalRequestItem(_Item):
    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str


@past("input[]")
class McpApprovalResponseItem(_Item):
    type: Literal["mcp_approval_response"]
    approval_request_id: str
    approve: bool
    reason: NotRequired[str | None]
    request_id: NotRequired[Ignored]


@past("input[]")
class ItemReference(TypedDict):
    """A reference to an item of a stored response of the same key, in its output or input."""

    type: NotRequired[Literal["item_reference"] | None]
    id: str


class _OneItem(OneOf):
    """An item without a type is a message, or a reference if it has no role."""

    def tag_of(self, value: Mapping[str, Any]) -> Any:
        is_bare = value.get("type") is None and "role" not in value and "id" in value
        return _REFERENCE if is_bare else super().tag_of(value)


_UNKNOWN_ITEM = f"items of type {{got}} are not supported; {', '.join(_PREFIXES)}, {_REFERENCE} are."
Item = Annotated[
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | Annotated[ToolOutputItem, AfterValidator(_has_a_source)]
    | ReasoningItem
    | CompactionItem
    | McpListItem
    | McpCallItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | ItemReference,
    _OneItem(_UNKNOWN_ITEM, key="type", served=False, default="message"),
]
Input = Annotated[
    str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)],
    OneOf("expected a string or an array of items, but got {got}"),
]


def made_call_id(response_id: str, place: int) -> str:
    """The id of a call in a response."""
    return f"call_{hashlib.blake2b(f'call {place} {response_id}'.encode(), digest_size=16).hexdigest()}"


def item_id(kind: str, response_id: str, place: int, *, is_input: bool = False) -> str:
    """The id of an item. It encodes the response, so that a reference to the item can be found."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{'i' if is_input else 'o'}{place}"


def response_of(item_id: str) -> str | None:
    """The response that has an item. None for an id that ``item_id`` did not create."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def references(items: list[JSONObject]) -> dict[int, str]:
    """The ids of references, by index in ``items``."""
    return {place: item["id"] for place, item in enumerate(items) if item["type"] == _REFERENCE}


def input_items(given: Input, response_id: str, unseal: Callable[[str], str | None]) -> list[JSONObject]:
    """Convert the ``input`` of a response to items with ids, in the form of lists of items. Keeps references.

    Raises:
        InvalidRequestError: reasoning or a summary has only encrypted content, and ``unseal`` cannot open it.
    """
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    return [_listed(item, response_id, place, unseal) for place, item in enumerate(items)]


def _listed(item: Any, response_id: str, place: int, unseal: Callable[[str], str | None]) -> JSONObject:
    kind = item.get("type") or ("message" if "role" in item else _REFERENCE)
    if kind == _REFERENCE:
        return {"type": kind, "id": item["id"]}
    made = item_id(kind, response_id, place, is_input=True)
    head = {"id": item.get("id") or made, "type": kind, "status": "completed"}
    if kind == "message":
        part = "output_text" if item["role"] == "assistant" else "input_text"
        return head | {"role": item["role"], "content": _parts(item["content"], part)}
    if kind in CALLS:
        fields = ("call_id", "name", "namespace", CALLS[kind])
        return head | {name: item[name] for name in fields if item.get(name) is not None}
    if kind in _OUTPUTS:
        named = ("call_id",) if item.get("call_id") is not None else ("name", "namespace")
        source = {name: item[name] for name in named if item.get(name) is not None}
        return head | source | {"output": _joined(_parts(item["output"], "input_text"))}
    if kind in _MCP_FIELDS:
        return mcp_item(kind, item, head["id"])
    if kind == "compaction":
        sealed = item["encrypted_content"]
        if (summary := unseal(sealed)) is None:
            raise wrong(f"input[{place}].encrypted_content", "it was not sealed by this server for this API key")
        return head | {"encrypted_content": sealed, "summary": [text_part("summary_text", summary)]}
    head["summary"] = _parts(item.get("summary") or (), "summary_text")
    content = item.get("content")
    if sealed := item.get("encrypted_content"):
        head["encrypted_content"] = sealed
        if not content and (content := unseal(sealed)) is None:
            rule = "it was not encrypted by this server for this API key; remove the reasoning"
            raise wrong(f"input[{place}].encrypted_content", rule)
    return head | {"content": _parts(content, "reasoning_text")} if content else head


def mcp_item(kind: str, given: Mapping[str, Any], item_id: str) -> JSONObject:
    """An item of MCP in the form of lists of items."""
    item = {"id": item_id, "type": kind} | {name: given.get(name) for name in _MCP_FIELDS[kind]}
    if kind == "mcp_call":
        item["status"] = "failed" if item["error"] is not None else "completed"
    elif kind == "mcp_approval_response":
        item["request_id"] = given["approval_request_id"]
    return item


def _parts(content: str | Iterable[TextPart | RefusalPart], kind: str) -> list[JSONObject]:
    """The content as a list of text parts of this kind. Refusals are kept."""
    if isinstance(content, str):
        return [text_part(kind, content)]
    return [dict(part) if part["type"] == "refusal" else text_part(kind, part["text"]) for part in content]


def text_part(kind: str, text: str, logprobs: Iterable[JSONObject] = ()) -> JSONObject:
    """A part of an item's content. Only output text has annotations and log-probabilities."""
    part: JSONObject = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": list(logprobs)} if kind == "output_text" else part


def chat_messages(items: list[JSONObject]) -> list[JSONObject]:
    """Convert checked items to chat messages. Successive reasoning, text and calls form one assistant message."""
    messages: list[JSONObject] = []
    asked = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    for item in items:
        if item["type"] in _MCP_FIELDS:
            messages += _mcp_messages(item, asked, messages)
        elif item["type"] in _OUTPUTS and "call_id" in item:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item["type"] in _OUTPUTS:
            name = ".".join(item[part] for part in ("namespace", "name") if part in item)
            messages.append({"role": "developer", "content": f"{name}: {item['output']}"})
        elif item["type"] == "compaction":
            messages.append({"role": "user", "content": SUMMARIZE})
            messages.append({"role": "assistant", "content": _joined(item["summary"])})
        elif item.get("role", "assistant") != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        else:
            _add_to_turn(messages, item)
    return messages


def _mcp_messages(item: JSONObject, asked: Mapping[str, JSONObject], messages: list[JSONObject]) -> list[JSONObject]:
    """The result of a call that was made, or refused by the client. The call joins the assistant's turn."""
    if item["type"] == "mcp_call":
        call, result = item, call_result(item)
    elif item["type"] == "mcp_approval_response" and not item["approve"] and item["approval_request_id"] in asked:
        call = asked[item["approval_request_id"]]
        result = "The user did not approve this call." + (f" {reason}" if (reason := item.get("reason")) else "")
    else:
        return []
    function = {"name": function_name(call["name"], call["server_label"]), "arguments": call["arguments"]}
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if turn is None or turn.get("tool_calls"):
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    turn["tool_calls"] = [{"id": call["id"], "type": "function", "function": function}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": result}]


def call_result(item: JSONObject) -> str:
    """What the model reads of a call of an MCP server."""
    error = item.get("error")
    if error is None:
        return item.get("output") or ""
    if not isinstance(error, dict):
        return f"Error: {error}"
    texts = [part.get("text", "") for part in error.get("content") or () if isinstance(part, dict)]
    return f"Error: {error.get('message') or ' '.join(texts)}"


def _add_to_turn(messages: list[JSONObject], item: JSONObject) -> None:
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if turn is None or (item["type"] == "message" and turn["content"]) or item["type"] == "reasoning":
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    if item["type"] == "message":
        turn["content"] = _joined(item["content"])
    elif item["type"] == "reasoning":
        turn["reasoning_content"] = _joined(item.get("content") or item["summary"])
    else:
        given = arguments_of(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
        function = {"name": function_name(item["name"], item.get("namespace")), "arguments": given}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(parts: list[JSONObject]) -> str:
    return "\n".join(part["text"] if "text" in part else part["refusal"] for part in parts)

"""Items of the Responses API: what clients send as input, given ids, and turned into chat messages."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import OneOf, closed, refuse

MAX_ITEMS = 4096
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

Ignored: TypeAlias = Any
"""What an answer has that is sent back as history, and that means nothing there."""


@closed
class TextPart(TypedDict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: NotRequired[Ignored]
    logprobs: NotRequired[Ignored]


@closed
class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


_ONLY_TEXT = OneOf("parts of type {got} are not supported; only text is.", key="type", served=False)
Part = Annotated[TextPart | RefusalPart, _ONLY_TEXT]
_TEXT_OR_PARTS = OneOf("expected a string or an array of text parts, but got {got}")
Content = Annotated[str | Annotated[list[Part], Field(min_length=1, fail_fast=True)], _TEXT_OR_PARTS]
Summary = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], _TEXT_OR_PARTS]


def _not_encrypted(value: object) -> object:
    if value is not None:
        raise refuse("reasoning is not encrypted here; send its content.", served=False)
    return value


class _Item(TypedDict):
    id: NotRequired[str | None]
    status: NotRequired[Ignored]


@closed
class MessageItem(_Item):
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    phase: NotRequired[Ignored]


@closed
class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


@closed
class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


@closed
class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: NotRequired[Summary | None]
    content: NotRequired[Summary | None]
    encrypted_content: NotRequired[Annotated[Any, AfterValidator(_not_encrypted)]]


_UNKNOWN_ITEM = f"items of type {{got}} are not supported; {', '.join(_PREFIXES)} are."
Item = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    OneOf(_UNKNOWN_ITEM, key="type", served=False, default="message"),
]
Input = Annotated[
    str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)],
    OneOf("expected a string or an array of items, but got {got}"),
]


def made_id(kind: str, response_id: str, place: int) -> str:
    """The id of an item of a response, or of a call ("call") in it."""
    digest = hashlib.blake2b(f"{kind} {place} {response_id}".encode(), digest_size=16).hexdigest()
    return f"{_PREFIXES.get(kind, kind)}_{digest}"


def new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_items(given: Input) -> list[JSONObject]:
    """``input`` as items with ids, each in the form in which it can be listed."""
    return [_listed(item) for item in ([{"role": "user", "content": given}] if isinstance(given, str) else given)]


def _listed(item: Any) -> JSONObject:
    kind = item.get("type") or "message"
    head = {"id": item.get("id") or new_id(kind), "type": kind, "status": "completed"}
    if kind == "message":
        part = "output_text" if item["role"] == "assistant" else "input_text"
        return head | {"role": item["role"], "content": _parts(item["content"], part)}
    if kind == "function_call":
        return head | {name: item[name] for name in ("call_id", "name", "arguments")}
    if kind == "function_call_output":
        return head | {"call_id": item["call_id"], "output": _joined(_parts(item["output"], "input_text"))}
    head["summary"] = _parts(item.get("summary") or (), "summary_text")
    return head | {"content": _parts(item["content"], "reasoning_text")} if item.get("content") else head


def _parts(content: str | Iterable[TextPart | RefusalPart], kind: str) -> list[JSONObject]:
    """A content as a list of text parts of this kind; refusals stay what they are."""
    if isinstance(content, str):
        return [text_part(kind, content)]
    return [dict(part) if part["type"] == "refusal" else text_part(kind, part["text"]) for part in content]


def text_part(kind: str, text: str, logprobs: Iterable[JSONObject] = ()) -> JSONObject:
    """A part of an item's content; only what a message says has annotations and log-probabilities."""
    part: JSONObject = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": list(logprobs)} if kind == "output_text" else part


def chat_messages(items: list[JSONObject]) -> list[JSONObject]:
    """Checked items as chat messages; reasoning, text and calls that follow each other are one assistant's turn."""
    messages: list[JSONObject] = []
    for item in items:
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item.get("role", "assistant") != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        else:
            _add_to_turn(messages, item)
    return messages


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
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(parts: list[JSONObject]) -> str:
    return "\n".join(part["text"] if "text" in part else part["refusal"] for part in parts)

"""Chat messages and tools in OpenAI's wire form; the front end makes of them what chat templates read."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from raylm.ingress.openai.fields import MAX_FIELDS, OneOf, at_most, closed, refuse

MAX_TOOLS = 128
_ROLES = ["developer", "system", "user", "assistant", "tool"]
_CONTENT = "expected a string or an array of text parts, but got {got}"


def _empty(value: object) -> None:
    if value:
        raise refuse("this field is not supported.", served=False)


Empty = Annotated[Any, AfterValidator(_empty), Field(json_schema_extra={"enum": [None, "", []]})]
Ignored = Annotated[Any, AfterValidator(lambda _: None)]


@closed
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


ContentPart = Annotated[
    TextPart, OneOf("parts of type {got} are not supported; only text is.", key="type", served=False)
]
Content = Annotated[str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)], OneOf(_CONTENT)]


@closed
class CalledFunction(TypedDict):
    """``arguments`` are a JSON object, as text."""

    name: str
    arguments: str


@closed
class ToolCall(TypedDict):
    type: Literal["function"]
    id: str
    function: Annotated[CalledFunction, at_most(MAX_FIELDS)]
    index: NotRequired[Ignored]


_ONLY_FUNCTIONS = OneOf("{got} is not supported; only function is.", key="type", served=False)
ToolCalls = Annotated[list[Annotated[ToolCall, _ONLY_FUNCTIONS]], Field(fail_fast=True)]


@closed
class _Message(TypedDict):
    """What every message may have: of an answer that is sent back as history also what it does not hold."""

    name: NotRequired[str | None]
    refusal: NotRequired[Empty]
    annotations: NotRequired[Empty]
    audio: NotRequired[Empty]
    function_call: NotRequired[Empty]


@closed
class Instructions(_Message):
    role: Literal["developer", "system"]
    content: Content


@closed
class UserMessage(_Message):
    role: Literal["user"]
    content: Content


@closed
class _Answer(_Message):
    content: NotRequired[Content | None]
    tool_calls: NotRequired[ToolCalls | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


@closed
class WrappedAnswer(_Answer):
    role: NotRequired[Literal["assistant"] | None]


@closed
class AssistantMessage(_Answer):
    """litellm hands back what OpenAI's messages do not have in a field of its own."""

    role: Literal["assistant"]
    provider_specific_fields: NotRequired[Annotated[WrappedAnswer, at_most(MAX_FIELDS)] | None]


@closed
class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


def _not_misspelt(role: str) -> str:
    if near := difflib.get_close_matches(role.lower(), _ROLES, n=1, cutoff=0.8):
        raise refuse(f"did you mean '{near[0]}'?")
    return role


_CUSTOM_ROLE = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$", json_schema_extra={"not": {"enum": list(_ROLES)}})


@closed
class CustomMessage(_Message):
    """Of a role that only chat templates know; whether the model's does is found out when it is rendered."""

    role: Annotated[str, _CUSTOM_ROLE, AfterValidator(_not_misspelt)]
    content: Content


def _complete(message: AssistantMessage) -> AssistantMessage:
    if wrapped := message.pop("provider_specific_fields", None):
        message = {**wrapped, **message}
    if message.get("content") is None and not message.get("tool_calls"):
        raise refuse(_CONTENT.format(got="null"), at="content")
    return message


Message = Annotated[
    Instructions | UserMessage | Annotated[AssistantMessage, AfterValidator(_complete)] | ToolMessage | CustomMessage,
    OneOf("expected developer, system, user, assistant, tool or a role of the template, but got {got}", key="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


@closed
class Function(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@closed
class FunctionTool(TypedDict):
    type: Literal["function"]
    function: Annotated[Function, at_most(MAX_FIELDS)]


Tool = Annotated[FunctionTool, _ONLY_FUNCTIONS]
Tools = Annotated[list[Tool], Field(fail_fast=True)]


@closed
class FunctionName(TypedDict):
    name: str


@closed
class NamedToolChoice(TypedDict):
    type: Literal["function"]
    function: Annotated[FunctionName, at_most(MAX_FIELDS)]


ToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[NamedToolChoice, OneOf("only function is supported.", key="type", served=False)],
    OneOf("expected none, auto, required or a function, but got {got}"),
]

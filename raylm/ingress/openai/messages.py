"""Chat messages and tools in OpenAI's JSON form. The front end converts them for chat templates."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, ValidationInfo
from typing_extensions import TypedDict

from raylm.ingress.openai.fields import (
    MAX_FIELDS,
    OneOf,
    at_most,
    closed,
    left_out_of_the_past,
    note_left_out,
    past,
    refuse,
    without_others,
)

MAX_TOOLS = 128
_ROLES = ["developer", "system", "user", "assistant", "tool"]
_CONTENT = "expected a string or an array of text parts, but got {got}"


def _empty(rule: str) -> AfterValidator:
    """For a field that must be empty. Other values are rejected with ``rule``."""

    def check(value: object) -> None:
        if value:
            raise refuse(rule, served=False)

    return AfterValidator(check)


_NOTHING = Field(json_schema_extra={"enum": [None, "", []]})
NoAudio = Annotated[Any, _empty("audio is not read here; send its text as 'content'."), _NOTHING]
NoFunctionCall = Annotated[Any, _empty("send calls as 'tool_calls'."), _NOTHING]
Ignored = Annotated[Any, AfterValidator(lambda _: None)]


@past("messages[].content[]")
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@past("messages[].content[]")
class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


def _as_text(part: TextPart | RefusalPart) -> TextPart:
    return {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part


_ONLY_TEXT = OneOf("parts of type {got} are not supported; only text is.", key="type", served=False)
ContentPart = Annotated[TextPart, _ONLY_TEXT]
AnswerPart = Annotated[Annotated[TextPart | RefusalPart, _ONLY_TEXT], AfterValidator(_as_text)]
Content = Annotated[str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)], OneOf(_CONTENT)]
AnswerContent = Annotated[str | Annotated[list[AnswerPart], Field(min_length=1, fail_fast=True)], OneOf(_CONTENT)]


@past("messages[].tool_calls[].function")
class CalledFunction(TypedDict):
    """``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@past("messages[].tool_calls[]")
class ToolCall(TypedDict):
    type: Literal["function"]
    id: str
    function: Annotated[CalledFunction, without_others(CalledFunction), at_most(MAX_FIELDS)]
    index: NotRequired[Ignored]


_ONLY_FUNCTIONS = OneOf("{got} is not supported; only function is.", key="type", served=False)
ToolCalls = Annotated[list[Annotated[ToolCall, _ONLY_FUNCTIONS]], Field(fail_fast=True)]


@past("messages[]")
class _Message(TypedDict):
    """Fields that every message may have, including fields of an answer that clients send back."""

    name: NotRequired[str | None]
    annotations: NotRequired[Annotated[Any, left_out_of_the_past("messages[].annotations")]]
    audio: NotRequired[NoAudio]
    function_call: NotRequired[NoFunctionCall]


@past("messages[]")
class _Prompt(_Message):
    refusal: NotRequired[Annotated[Any, left_out_of_the_past("messages[].refusal")]]


@past("messages[]")
class Instructions(_Prompt):
    role: Literal["developer", "system"]
    content: Content


@past("messages[]")
class UserMessage(_Prompt):
    role: Literal["user"]
    content: Content


@past("messages[]")
class _Answer(_Message):
    content: NotRequired[AnswerContent | None]
    refusal: NotRequired[str | None]
    tool_calls: NotRequired[ToolCalls | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


@past("messages[].provider_specific_fields")
class WrappedAnswer(_Answer):
    role: NotRequired[Literal["assistant"] | None]


@past("messages[]")
class AssistantMessage(_Answer):
    """An answer in history. litellm puts fields that OpenAI's messages lack in ``provider_specific_fields``."""

    role: Literal["assistant"]
    provider_specific_fields: NotRequired[
        Annotated[WrappedAnswer, without_others(WrappedAnswer), at_most(MAX_FIELDS)] | None
    ]


@past("messages[]")
class ToolMessage(_Prompt):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


def _not_misspelt(role: str) -> str:
    if near := difflib.get_close_matches(role.lower(), _ROLES, n=1, cutoff=0.8):
        raise refuse(f"did you mean '{near[0]}'?")
    return role


_CUSTOM_ROLE = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$", json_schema_extra={"not": {"enum": list(_ROLES)}})


@past("messages[]")
class CustomMessage(_Prompt):
    """A message with a role that is not OpenAI's. Rendering shows whether the chat template supports it."""

    role: Annotated[str, _CUSTOM_ROLE, AfterValidator(_not_misspelt)]
    content: Content


def _complete(message: AssistantMessage, info: ValidationInfo) -> AssistantMessage:
    """Merge the fields that litellm wraps. A refusal becomes the content if there is none; the default is ""."""
    if wrapped := message.pop("provider_specific_fields", None):
        message = {**wrapped, **message}
    refusal = message.get("refusal")
    if message.get("content") is None and not message.get("tool_calls"):
        message["content"] = refusal or ""
    elif refusal:
        note_left_out("messages[].refusal", info)
    if refusal is not None:
        message["refusal"] = None
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

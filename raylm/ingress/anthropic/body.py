"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and their conversion to chat completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeAlias

import orjson
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.fields import MAX_FIELDS, Body, Model, OneOf, StrictPart, Strings, closed, past, refuse
from raylm.ingress.openai.messages import MAX_TOOLS

# Fields of a chat completion, and their names in this API; for errors.
PARAM_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Ignored: TypeAlias = Any
"""Hints that do not change the answer by Anthropic's definition."""


@closed
class SystemBlock(TypedDict):
    type: Literal["text"]
    text: str
    cache_control: NotRequired[Ignored]
    citations: NotRequired[Ignored]


_OF_A_MESSAGE = past("messages[].content[]")


@_OF_A_MESSAGE
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str
    cache_control: NotRequired[Ignored]
    citations: NotRequired[Ignored]


@_OF_A_MESSAGE
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[Ignored]


@_OF_A_MESSAGE
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str
    cache_control: NotRequired[Ignored]
    caller: NotRequired[Ignored]


def _blocks(kinds: str) -> OneOf:
    return OneOf(f"blocks of type {{got}} are not supported here; {kinds} are.", key="type", served=False)


_TEXT_OR_BLOCKS = OneOf("expected a string or an array of blocks, but got {got}")
_SOME = Field(min_length=1, fail_fast=True)
TextBlocks = Annotated[list[Annotated[TextBlock, _blocks("text")]], _SOME]
Text = Annotated[str | TextBlocks, _TEXT_OR_BLOCKS]
System = Annotated[str | Annotated[list[Annotated[SystemBlock, _blocks("text")]], _SOME], _TEXT_OR_BLOCKS]


@_OF_A_MESSAGE
class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[Annotated[str | list[Annotated[TextBlock, _blocks("text")]], _TEXT_OR_BLOCKS] | None]
    is_error: NotRequired[bool | None]
    cache_control: NotRequired[Ignored]


UserBlock = Annotated[TextBlock | ToolResultBlock, _blocks("text, tool_result")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, _blocks("text, thinking, tool_use")]


@past("messages[]")
class SystemMessage(TypedDict):
    role: Literal["system"]
    content: Text


@past("messages[]")
class UserMessage(TypedDict):
    role: Literal["user"]
    content: Annotated[str | Annotated[list[UserBlock], _SOME], _TEXT_OR_BLOCKS]


@past("messages[]")
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | Annotated[list[AssistantBlock], _SOME], _TEXT_OR_BLOCKS]


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage,
    OneOf("expected user, assistant or system, but got {got}", key="role"),
]


@closed
class CustomTool(TypedDict):
    type: NotRequired[Literal["custom"] | None]
    name: str
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]
    cache_control: NotRequired[Ignored]
    eager_input_streaming: NotRequired[Ignored]


_CUSTOM = OneOf("{got} is not supported; only custom tools are.", key="type", served=False, default="custom")
Tool = Annotated[CustomTool, _CUSTOM]


class AnyToolChoice(StrictPart):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None
    cache_control: Any = None


class NamedToolChoice(StrictPart):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None
    cache_control: Any = None


ToolChoice = Annotated[AnyToolChoice | NamedToolChoice, OneOf("expected auto, any, tool or none", key="type")]


class Thinking(StrictPart):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Any = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _served(self) -> Thinking:
        if self.display not in (None, "summarized"):
            raise refuse("the reasoning is always shown.", at="display", served=False)
        if self.type == "enabled" and self.budget_tokens is None:
            raise refuse("expected a positive integer, but got null", at="budget_tokens")
        return self


class OutputFormat(StrictPart):
    type: Literal["json_schema"]
    schema_: Annotated[Any, Field(alias="schema")] = None
    cache_control: Any = None


_JSON_SCHEMA = OneOf("only {{'type': 'json_schema', 'schema': …}} is supported.", key="type", served=False)


class OutputConfig(StrictPart):
    effort: Any = None
    format: Annotated[OutputFormat, _JSON_SCHEMA] | None = None
    cache_control: Any = None


class ClearThinking(StrictPart):
    """Keeps the reasoning of all turns. This server removes none; the chat template decides what the model sees."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None

    @model_validator(mode="after")
    def _served(self) -> ClearThinking:
        if self.keep not in ("all", {"type": "all"}):
            raise refuse("reasoning is not removed; give 'all'.", at="keep", served=False)
        return self


class InputTokens(StrictPart):
    type: Literal["input_tokens"]
    value: Annotated[int, Field(ge=0, lt=2**31)]


class ToolUses(StrictPart):
    type: Literal["tool_uses"]
    value: Annotated[int, Field(ge=0, lt=2**31)]


_TRIGGERS = OneOf("expected input_tokens or tool_uses, but got {got}", key="type")
_NAMES = OneOf("expected a boolean or an array of strings, but got {got}")


class ClearToolUses(StrictPart):
    """Clears the results of old tool uses if the conversation exceeds ``trigger``. The defaults are Anthropic's."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, _TRIGGERS] = InputTokens(type="input_tokens", value=100_000)
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Strings | None = None
    clear_tool_inputs: Annotated[bool | Strings, _NAMES] | None = None


_EDITS = OneOf(
    "{got} is not supported; only clear_thinking_20251015 and clear_tool_uses_20250919 are.", key="type", served=False
)
Edits = Annotated[list[Annotated[ClearThinking | ClearToolUses, _EDITS]], Field(max_length=MAX_FIELDS, fail_fast=True)]


class ContextManagement(StrictPart):
    edits: Edits | None = None


class Metadata(StrictPart):
    user_id: Any = None  # for abuse detection
    cache_control: Any = None


class CountTokensRequest(Body):
    unserved: ClassVar[frozenset[str]] = frozenset({
        "container", "diagnostics", "inference_geo", "mcp_servers", "output_format", "speed",
        "user_profile_id", "workspace_id",
    })  # fmt: skip

    of_tools: ClassVar[tuple[str, ...]] = ("tools", "tool_choice")
    of_reasoning: ClassVar[tuple[str, ...]] = ("thinking", "output_config.effort")

    model: Model = ""
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: System | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None

    @property
    def asks_for_cache(self) -> bool:
        """Whether ``cache_control`` is set anywhere."""
        contents = [message["content"] for message in self.messages]
        parts: list[Any] = [*(self.tools or ()), *(self.system if isinstance(self.system, list) else ())]
        parts += [block for content in contents if isinstance(content, list) for block in content]
        return bool(self.cache_control) or any(part.get("cache_control") for part in parts)

    def as_chat(self) -> ChatCompletionRequest:
        """Convert to a chat completion. Its errors may have a chat completion's names of fields (PARAM_NAMES)."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        fields = self.chat_fields() | {
            "model": self.model,
            "messages": system + [turn for message in self.messages for turn in _turns(message)],
            "continue_final_message": self.messages[-1]["role"] == "assistant" and not self._ends_with_a_call,
            "tools": [_function(tool) for tool in self.tools or ()] or None,
        }
        return ChatCompletionRequest.parse({name: value for name, value in fields.items() if value is not None})

    @property
    def _ends_with_a_call(self) -> bool:
        """Whether the last message has a tool_use block."""
        content: Any = self.messages[-1]["content"]
        return isinstance(content, list) and any(block["type"] == "tool_use" for block in content)

    def chat_fields(self) -> JSONObject:
        """tool_choice, thinking and output_config as fields of a chat completion."""
        fields: JSONObject = {"chat_template_kwargs": {"enable_thinking": False}}
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            fields["tool_choice"] = _TOOL_CHOICES[choice.type]
        if choice is not None and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.thinking is not None and self.thinking.type != "disabled":
            fields["chat_template_kwargs"] = {"enable_thinking": True}
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if (chosen := self.output_config.format) is not None:
                schema = {"name": "output", "schema": chosen.schema_, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages. ``metadata`` and ``service_tier`` are accepted only with values that change nothing."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Strings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _leaves_an_answer(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise refuse("it must be less than 'max_tokens'", at="thinking.budget_tokens")
        if self._ends_with_a_call:
            rule = "a tool_use block needs a next message with its tool_result"
            raise refuse(rule, at=f"messages[{len(self.messages) - 1}].content")
        return self

    def chat_fields(self) -> JSONObject:
        return super().chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
        }


def _text(content: Text | System | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content or ())


def _function(tool: CustomTool) -> JSONObject:
    function: JSONObject = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: value for name in ("description", "strict") if (value := tool.get(name)) is not None}
    return {"type": "function", "function": function}


def _turns(message: SystemMessage | UserMessage | AssistantMessage) -> list[JSONObject]:
    """Convert a message to chat messages: first one for each tool result, then the user's text."""
    if isinstance(message["content"], str):
        return [{"role": message["role"], "content": message["content"]}]
    if message["role"] == "system":
        return [{"role": "system", "content": _text(message["content"])}]
    blocks: list[Any] = list(message["content"])
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if message["role"] == "user":
        results = [_result(block) for block in blocks if block["type"] == "tool_result"]
        return [*results, {"role": "user", "content": "\n".join(texts)}] if texts else results
    turn: JSONObject = {"role": "assistant", "content": "".join(texts)}
    if thinking := "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        turn["reasoning_content"] = thinking
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        turn["tool_calls"] = calls
    return [turn]


def _call(block: ToolUseBlock) -> JSONObject:
    given = block["input"]  # some clients send the text of arguments that were cut
    arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _result(block: ToolResultBlock) -> JSONObject:
    text = _text(block.get("content"))
    content = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}

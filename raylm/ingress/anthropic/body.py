"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and the chat completion they come down to."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raylm.errors import InvalidRequestError
from raylm.ingress.anthropic.messages import chat_messages, chat_tools, system_text
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.fields import Body, Strings, check_fields, json_name, unsupported, wrong
from raylm.ingress.openai.messages import MAX_TOOLS

# A chat completion's names of fields, and what they are called here; for errors.
PARAM_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Hints and labels that by Anthropic's definition do not change the answer.
_HINTS = {"cache_control"}


class CountTokensRequest(Body):
    """What makes a prompt. ``cache_control`` is a hint: equal beginnings are cached without it."""

    unserved: ClassVar[frozenset[str]] = frozenset({
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "output_format", "speed",
        "user_profile_id", "workspace_id",
    })  # fmt: skip

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    system: Any = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion that answers this.

        Raises:
            InvalidRequestError: a value is wrong; ``param`` may have a chat completion's name for it (PARAM_NAMES).
        """
        messages = chat_messages(self.messages)
        goes_on = messages[-1]["role"] == "assistant"
        if system := system_text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        body = self.chat_fields() | {"model": self.model, "messages": messages, "continue_final_message": goes_on}
        if self.tools:
            body["tools"] = chat_tools(self.tools)
        return ChatCompletionRequest.parse({name: value for name, value in body.items() if value is not None})

    def chat_fields(self) -> JSONObject:
        """What tool_choice, thinking and output_config are in a chat completion."""
        fields: JSONObject = {"chat_template_kwargs": {"enable_thinking": False}}
        if self.tool_choice is not None:
            fields |= _chat_tool_choice(self.tool_choice)
        if self.thinking is not None:
            fields |= _chat_thinking(self.thinking)
        if self.output_config is not None:
            check_fields(self.output_config, {"effort", "format"} | _HINTS, "output_config")
            fields["response_format"] = _chat_format(self.output_config.get("format"))
            fields["reasoning_effort"] = self.output_config.get("effort")
        return fields


class MessagesRequest(CountTokensRequest):
    """Fields of a message.

    ``metadata`` (the end user's id, for abuse detection) and ``service_tier`` are accepted with the values that this
    server does anyway.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Strings | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def chat_fields(self) -> JSONObject:
        """The same, and how to draw.

        Raises:
            InvalidRequestError: a value is wrong.
        """
        if self.metadata is not None:
            check_fields(self.metadata, {"user_id"} | _HINTS, "metadata")
        budget = (self.thinking or {}).get("budget_tokens")
        if isinstance(budget, int) and budget >= self.max_tokens:
            message = "'thinking.budget_tokens' must be less than 'max_tokens'."
            raise InvalidRequestError(message, param="thinking.budget_tokens")
        return super().chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
        }


def _chat_tool_choice(choice: JSONObject) -> JSONObject:
    kind = choice.get("type")
    check_fields(choice, {"type", "name", "disable_parallel_tool_use"} | _HINTS, "tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}} | parallel
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise wrong("tool_choice.type", "expected auto, any, tool or none")
    return {"tool_choice": _TOOL_CHOICES[kind]} | parallel


def _chat_thinking(thinking: JSONObject) -> JSONObject:
    kind = thinking.get("type")
    check_fields(thinking, {"type", "budget_tokens", "display"} | _HINTS, "thinking")
    if thinking.get("display") not in (None, "summarized"):
        raise unsupported("thinking.display", "thoughts are always shown.")
    if kind == "disabled":
        return {}
    if kind not in ("enabled", "adaptive"):
        raise wrong("thinking.type", "expected enabled, adaptive or disabled")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise wrong("thinking.budget_tokens", f"expected a positive integer, but got {json_name(budget)}")
    return {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}


def _chat_format(chosen: object) -> JSONObject | None:
    if chosen is None:
        return None
    if not isinstance(chosen, dict) or chosen.get("type") != "json_schema":
        raise unsupported("output_config.format", "only {'type': 'json_schema', 'schema': …} is supported.")
    check_fields(chosen, {"type", "schema"} | _HINTS, "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": chosen.get("schema"), "strict": True}}

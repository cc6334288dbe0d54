"""The body of /v1/responses, and its conversion to a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypedDict

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import CacheRetention, ChatCompletionRequest, ServiceTier, Verbosity
from raylm.ingress.openai.fields import MAX_FIELDS, NumLogprobs, OneOf, StrictPart, at_most, closed, refuse, wish
from raylm.ingress.openai.generation import SamplingBody
from raylm.ingress.openai.messages import MAX_TOOLS
from raylm.ingress.responses.input import Input
from raylm.ingress.responses.mcp.tools import McpTool
from raylm.ingress.responses.tools import CallableTool, Tool, ToolChoice

_LOGPROBS = "message.output_text.logprobs"
_SEALED_REASONING = "reasoning.encrypted_content"
# Fields with the same name in a chat completion, besides those of SamplingBody.
_SAME_NAME = (
    "chat_template_kwargs", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "thinking_token_budget",
)  # fmt: skip
# Fields of a chat completion, and their names in this API; for errors.
PARAM_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}


def _only(rule: str, *served: object) -> AfterValidator:
    """Rejects values other than ``served``, with the message ``rule``."""

    def check(value: object) -> object:
        if value not in served:
            raise refuse(rule, served=False)
        return value

    return AfterValidator(check)


Summary = Literal["auto", "concise", "detailed", "none"]


ConversationId = Annotated[str, Field(max_length=128)]


@closed
class ConversationName(TypedDict):
    id: ConversationId


class StreamOptions(StrictPart):
    include_obfuscation: Annotated[bool | None, _only("obfuscation is not supported; give false.", None, False)] = None


class TextOptions(StrictPart):
    format: dict[str, Any] | None = None
    verbosity: Annotated[Verbosity | None, wish("text.verbosity", None, "medium")] = None


class ReasoningOptions(StrictPart):
    effort: Any = None
    summary: Annotated[Summary | None, wish("reasoning.summary", None, "auto")] = None
    generate_summary: Annotated[Summary | None, wish("reasoning.generate_summary", None, "auto")] = None


class ResponsesRequest(SamplingBody):
    """The body of /v1/responses.

    ``metadata``, ``user``, ``safety_identifier`` and ``prompt_cache_key`` have no effect, as OpenAI defines them, and
    ``client_metadata``, in which Codex describes itself, has none.
    ``max_tool_calls`` limits the calls of tools of MCP servers.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "context_management", "moderation", "prompt", "prompt_cache_options",
    })  # fmt: skip

    served_by: ClassVar[dict[str, str]] = SamplingBody.served_by | {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
    of_tools: ClassVar[tuple[str, ...]] = ("tools", "tool_choice", "parallel_tool_calls")
    of_reasoning: ClassVar[tuple[str, ...]] = ("reasoning.effort", "thinking_token_budget")

    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    conversation: (
        Annotated[ConversationId | ConversationName, OneOf("expected a string or an object, but got {got}")] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Any] | None, at_most(16)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention = None
    service_tier: ServiceTier = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    client_metadata: Annotated[dict[str, Any] | None, at_most(MAX_FIELDS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @model_validator(mode="after")
    def _served(self) -> ResponsesRequest:
        if self.background and self.store is False:
            raise refuse("it needs 'store', because the answer is fetched later", at="background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise refuse("it cannot be used together with 'previous_response_id'", at="conversation")
        labels = [server["server_label"] for _, server in self.servers()]
        for place, label in enumerate(labels):
            if label in labels[:place]:
                path, _ = list(self.servers())[place]
                raise refuse(f"there is another MCP server '{label}'", at=f"{path}.server_label")
        if not {_LOGPROBS, _SEALED_REASONING}.issuperset(self.include or ()):
            raise refuse(f"only {_LOGPROBS} and {_SEALED_REASONING} are supported.", at="include", served=False)
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation["id"] if isinstance(self.conversation, dict) else self.conversation

    @property
    def with_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @property
    def with_sealed_reasoning(self) -> bool:
        return _SEALED_REASONING in (self.include or ())

    def servers(self) -> Iterator[tuple[str, McpTool]]:
        """The tools of kind mcp, and their paths in the body."""
        for place, tool in enumerate(self.tools or ()):
            if tool["type"] == "mcp":
                yield f"tools[{place}]", tool

    def as_chat(
        self,
        messages: list[JSONObject],
        tools: list[CallableTool],
        tool_choice: JSONObject | str | None,
        max_tokens: int | None,
    ) -> ChatCompletionRequest:
        """The chat completion over ``messages``. Its errors have a chat completion's names of fields (PARAM_NAMES)."""
        body = {name: getattr(self, name) for name in (*SamplingBody.model_fields, *_SAME_NAME)}
        body |= {"messages": messages, "max_completion_tokens": max_tokens, "tool_choice": tool_choice}
        if self.with_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        body["tools"] = [tool.as_function() for tool in tools] or None
        if self.text is not None and (form := self.text.format) is not None:
            body["response_format"] = _nested(form, "json_schema") if form.get("type") == "json_schema" else form
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return ChatCompletionRequest.parse({name: value for name, value in body.items() if value is not None})


def _nested(given: Mapping[str, Any], name: str) -> JSONObject:
    """Convert {"type": …, …} to the form of chat completions: {"type": …, name: {…}}."""
    inner = {key: value for key, value in given.items() if key != "type" and value is not None}
    return {"type": given["type"], name: inner}

"""The body of /v1/responses, and the chat completion that it comes down to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from raylm.errors import InvalidRequestError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.fields import Body, OneOf, Part, RequestId, at_most, closed, refuse, unsupported
from raylm.ingress.openai.messages import MAX_TOOLS
from raylm.ingress.responses.input import Input
from raylm.params import MAX_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_SAME_NAME = (
    "model", "temperature", "top_p", "parallel_tool_calls", "service_tier", "user", "safety_identifier", "metadata",
    "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# Beyond OpenAI's fields: those of a chat completion that make sense for one answer, checked there.
EXTENSIONS = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "logit_bias", "allowed_token_ids", "bad_words", "priority", "cache_salt", "chat_template_kwargs",
    "structured_outputs", "thinking_token_budget",
)  # fmt: skip
# A chat completion's names of fields, and what they are called here; for errors.
PARAM_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}


@closed
class FunctionTool(TypedDict):
    type: Literal["function"]
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


Tool = Annotated[FunctionTool, OneOf("{got} is not supported; only function is.", key="type", served=False)]


@closed
class NamedToolChoice(TypedDict):
    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    str | Annotated[NamedToolChoice, OneOf("only function is supported.", key="type", served=False)],
    OneOf("expected a string or an object, but got {got}"),
]


class StreamOptions(Part):
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _served(self) -> StreamOptions:
        if self.include_obfuscation:
            raise refuse("obfuscation is not supported; give false.", at="include_obfuscation", served=False)
        return self


class TextOptions(Part):
    format: dict[str, Any] | None = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _served(self) -> TextOptions:
        if self.verbosity not in (None, "medium"):
            raise refuse("only medium is supported.", at="verbosity", served=False)
        return self


class ReasoningOptions(Part):
    effort: Any = None
    summary: Any = None
    generate_summary: Any = None

    @model_validator(mode="after")
    def _served(self) -> ReasoningOptions:
        for name in ("summary", "generate_summary"):
            if getattr(self, name) not in (None, "auto"):
                raise refuse("the reasoning is returned whole and is not summarized.", at=name, served=False)
        return self


class ResponsesRequest(Body):
    """Fields of a response.

    Accepted and without effect on the answer by OpenAI's own definition: ``metadata``, ``user``, ``safety_identifier``,
    ``prompt_cache_key``.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "context_management", "conversation", "max_tool_calls", "moderation", "prompt", "prompt_cache_options",
    })  # fmt: skip

    model: str
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Any] | None, at_most(16)] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    request_id: RequestId | None = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    priority: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None

    def check(self) -> None:
        """Refuse combinations and values that are not served.

        Raises:
            InvalidRequestError: fields contradict each other, or one has a wrong form.
            UnsupportedFieldError: OpenAI serves this value and this server does not.
        """
        if self.background and self.store is False:
            raise InvalidRequestError("'background' needs 'store': nobody could fetch the answer.", param="background")
        if self.background and self.stream:
            raise unsupported("stream", "a background response is fetched when it is done, not streamed.")
        for name in self.include or ():
            if name != _LOGPROBS:
                raise unsupported("include", f"only {_LOGPROBS} is supported.")

    @property
    def with_logprobs(self) -> bool:
        """Whether the text's tokens come with their log-probabilities."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def as_chat(self, messages: list[JSONObject]) -> ChatCompletionRequest:
        """The chat completion over ``messages`` that answers this.

        Raises:
            InvalidRequestError: a value is wrong; ``param`` has a chat completion's name for it (see PARAM_NAMES).
        """
        body = {name: value for name in (*_SAME_NAME, *EXTENSIONS) if (value := getattr(self, name)) is not None}
        body |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.with_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            body["tools"] = [_nested(tool, "function") for tool in self.tools]
        if self.tool_choice is not None:
            choice = self.tool_choice
            body["tool_choice"] = choice if isinstance(choice, str) else _nested(choice, "function")
        if self.text is not None and (chosen := self.text.format) is not None:
            body["response_format"] = _nested(chosen, "json_schema") if chosen.get("type") == "json_schema" else chosen
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return ChatCompletionRequest.parse({name: value for name, value in body.items() if value is not None})


def _nested(given: Mapping[str, Any], name: str) -> JSONObject:
    """{"type": …, …} as chat completions write it: {"type": …, name: {…}}."""
    inner = {key: value for key, value in given.items() if key != "type" and value is not None}
    return {"type": given["type"], name: inner}

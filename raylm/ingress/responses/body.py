"""The body of /v1/responses, and the chat completion that it comes down to."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raylm.errors import InvalidRequestError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.fields import Body, RequestId, at_most, check_fields, json_name, unsupported
from raylm.ingress.openai.messages import MAX_TOOLS
from raylm.params import MAX_LOGPROBS

MAX_ITEMS = 4096
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


class ResponsesRequest(Body):
    """Fields of a response.

    Accepted and without effect on the answer by OpenAI's own definition: ``metadata``, ``user``, ``safety_identifier``,
    ``prompt_cache_key``.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "context_management", "conversation", "max_tool_calls", "moderation", "prompt", "prompt_cache_options",
    })  # fmt: skip

    model: str
    input: Any
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
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
        self._check_objects()

    def _check_objects(self) -> None:
        if self.stream_options is not None:
            check_fields(self.stream_options, {"include_obfuscation"}, "stream_options")
            if self.stream_options.get("include_obfuscation"):
                raise unsupported("stream_options.include_obfuscation", "obfuscation is not supported; give false.")
        if self.text is not None:
            check_fields(self.text, {"format", "verbosity"}, "text")
            if self.text.get("verbosity") not in (None, "medium"):
                raise unsupported("text.verbosity", "only medium is supported.")
        if self.reasoning is not None:
            check_fields(self.reasoning, {"effort", "summary", "generate_summary"}, "reasoning")
            for name in ("summary", "generate_summary"):
                if self.reasoning.get(name) not in (None, "auto"):
                    raise unsupported(f"reasoning.{name}", "thoughts are returned whole and are not summarized.")

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
            body["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            body["tool_choice"] = _chat_tool_choice(self.tool_choice)
        if self.text is not None and self.text.get("format") is not None:
            body["response_format"] = _chat_format(self.text["format"])
        if self.reasoning is not None and self.reasoning.get("effort") is not None:
            body["reasoning_effort"] = self.reasoning["effort"]
        return ChatCompletionRequest.parse({name: value for name, value in body.items() if value is not None})


def _chat_tool(tool: JSONObject, path: str) -> JSONObject:
    """{"type": "function", "name": …} as chat completions nest it."""
    kind = tool.get("type")
    if kind != "function":
        shown = f"'{kind[:30]}'" if isinstance(kind, str) else json_name(kind)
        raise unsupported(f"{path}.type", f"{shown} is not supported; only function is.")
    check_fields(tool, {"type", "name", "description", "parameters", "strict"}, path)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", "only function is supported.")
    check_fields(choice, {"type", "name"}, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _chat_format(chosen: object) -> JSONObject:
    if not isinstance(chosen, dict):
        where = "text.format"
        raise InvalidRequestError(f"Invalid type for '{where}': expected an object.", param=where)
    if chosen.get("type") != "json_schema":
        return chosen
    inner = {name: value for name, value in chosen.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}

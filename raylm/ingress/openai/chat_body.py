"""The body of /v1/chat/completions; every field of OpenAI's is served, accepted as without effect, or refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.openai.fields import at_most, unsupported
from raylm.ingress.openai.generation_body import GenerationBody
from raylm.params import MAX_LOGPROBS

MAX_TOOLS = 128

_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class ChatCompletionRequest(GenerationBody):
    """Fields of a chat completion.

    Without effect on the answer by OpenAI's own definition, so accepted: ``metadata`` (labels of stored answers),
    ``safety_identifier`` and ``user`` (abuse detection), ``prompt_cache_key`` (a hint for routing to caches).
    Accepted only with the value that this server does anyway: ``store`` false, ``modalities`` ["text"],
    ``service_tier`` auto or default, ``prompt_cache_retention`` in_memory.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "audio", "documents", "echo", "function_call", "functions", "moderation", "prediction",
        "prompt_cache_options", "verbosity", "web_search_options",
    })  # fmt: skip

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue] | None, at_most(16)] = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    store: bool | None = None

    def check(self, config: Config) -> None:
        """Refuse combinations and values that are not served.

        Raises:
            InvalidRequestError: fields contradict each other.
            UnsupportedFieldError: OpenAI serves this value and this server does not.
        """
        super().check(config)
        self._check_served_values()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "'max_tokens' and 'max_completion_tokens' are two names of one limit and must not differ."
            raise InvalidRequestError(message, param="max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' must not both be true."
            raise InvalidRequestError(message, param="continue_final_message")

    def _check_served_values(self) -> None:
        if self.store:
            raise unsupported("store", "answers are not stored; give false.")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", 'only ["text"] is supported.')
        if self.service_tier not in (None, "auto", "default"):
            raise unsupported("service_tier", "only auto and default are supported.")
        if self.prompt_cache_retention == "24h":
            raise unsupported("prompt_cache_retention", "only in_memory is supported.")

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives each token's logprob comes with, None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def generation_prompt(self) -> bool:
        """Whether the template opens a new assistant turn; by default it does unless the last message goes on."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

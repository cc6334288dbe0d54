"""The requests of the conformance run: every endpoint, whole and streamed, with options that change the answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

QUESTION = "What is a KV cache?"
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
WEATHER: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [{"type": "function", "function": TOOL}],
    "temperature": 0,
    "max_tokens": 200,
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 200}
TEXT: dict[str, Any] = {"prompt": "A scheduler", "max_tokens": 12}
RESPONSE: dict[str, Any] = {"input": QUESTION, "max_output_tokens": 24}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}


@dataclass(frozen=True)
class Case:
    """One request. Its answer, or each chunk, must conform to ``schema``."""

    path: str
    body: dict[str, Any]
    schema: str
    status: int = 200


def cases() -> Iterator[Case]:
    """All requests, without ``model``."""
    yield from _both("/v1/chat/completions", CHAT, _CHAT_OPTIONS, "CreateChatCompletion{}Response", "Stream")
    yield from _both("/v1/completions", TEXT, _TEXT_OPTIONS, "CreateCompletionResponse", "")
    for options in _RESPONSE_OPTIONS:
        yield Case("/v1/responses", RESPONSE | options, "Response")
        yield Case("/v1/responses", RESPONSE | options | {"stream": True}, "ResponseStreamEvent")
    yield Case("/v1/responses/compact", {"input": QUESTION}, "CompactResource")
    for options in _MESSAGE_OPTIONS:
        yield Case("/v1/messages", MESSAGE | options, "anthropic.Message")
        yield Case("/v1/messages", MESSAGE | options | {"stream": True}, "anthropic.RawMessageStreamEvent")
    yield Case("/v1/messages/count_tokens", {"messages": MESSAGE["messages"]}, "anthropic.MessageTokensCount")
    for options in _EMBEDDING_OPTIONS:
        yield Case("/v1/embeddings", {"input": "A block pool"} | options, "CreateEmbeddingResponse")
    yield from _REFUSED


def _both(path: str, body: dict[str, Any], options: list[dict[str, Any]], schema: str, infix: str) -> Iterator[Case]:
    for option in options:
        if "prompt_logprobs" not in option:
            yield Case(path, body | option | {"stream": True}, schema.format(infix))
            usage = {"include_usage": True, "continuous_usage_stats": True}
            yield Case(path, body | option | {"stream": True, "stream_options": usage}, schema.format(infix))
        yield Case(path, body | option, schema.format(""))


_CHAT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 0.8, "seed": 1},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 5, "n": 2},
    {"stop": ["a", "e"], "return_token_ids": True},
    {"max_tokens": 1},
    {"prompt_logprobs": 1},
    {"service_tier": "auto", "metadata": {"a": "b"}, "user": "u"},
    WEATHER,
    WEATHER | {"n": 2, "temperature": 1, "seed": 3},
    THINKING,
    THINKING | {"n": 2, "logprobs": True, "top_logprobs": 1},
    WEATHER | THINKING,
    THINKING | {"include_reasoning": False},
    {"logprobs": True, "logprob_token_ids": [300, 7], "return_tokens_as_token_ids": True},
    {"messages": [*CHAT["messages"], {"role": "assistant", "content": "A KV"}], "echo": True, "n": 2},
    {"truncate_prompt_tokens": 8, "truncation_side": "right", "add_special_tokens": True},
    {"structured_outputs": {"json": True}, "max_tokens": 64},
]
_TEXT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ["A scheduler", "The worker"], "n": 2},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]], "logprobs": 0},
    {"logprobs": 5},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"stop": "e", "return_token_ids": True},
    {"prompt_logprobs": 2},
    {"logprobs": 1, "logprob_token_ids": [300, 7, 8], "return_tokens_as_token_ids": True, "echo": True},
    {"truncate_prompt_tokens": 2, "truncation_side": "left", "add_special_tokens": False},
]
_FLAT_TOOL = {"type": "function", **TOOL}
_CUSTOM_TOOL = {"type": "custom", "name": "note", "description": "Write a note."}
_NAMESPACE = {"type": "namespace", "name": "town", "description": "A town.", "tools": [_FLAT_TOOL, _CUSTOM_TOOL]}
_RESPONSE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.3, "top_p": 0.9, "user": "u"},
    {"top_logprobs": 3},
    {"include": ["message.output_text.logprobs"], "store": False},
    {"max_output_tokens": 200},
    {"truncation": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
    {"input": "What is the weather in Rome?", "tools": [_FLAT_TOOL], "temperature": 0, "max_output_tokens": 200},
    {
        "input": "What is the weather in Rome?",
        "tools": [_NAMESPACE],
        "tool_choice": "required",
        "max_output_tokens": 99,
    },
    {"reasoning": {"effort": "high"}, "max_output_tokens": 200},
]
_MESSAGE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"system": "Be brief.", "temperature": 0.3, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}},
    {"stop_sequences": ["a", "e"]},
    {"max_tokens": 200},
    {"thinking": {"type": "adaptive"}, "max_tokens": 200},
    {
        "messages": WEATHER["messages"],
        "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
        "temperature": 0,
        "max_tokens": 200,
    },
]
_EMBEDDING_OPTIONS: list[dict[str, Any]] = [
    {},
    {"input": ["A block pool", "The scheduler"], "dimensions": 16},
    {"input": [[5, 6, 7], [8]], "encoding_format": "float", "user": "u"},
    {"encoding_format": "base64"},
]
_REFUSED = [
    Case("/v1/chat/completions", CHAT | {"temperature": 3}, "ErrorResponse", 400),
    Case("/v1/chat/completions", CHAT | {"temperature": 3, "stream": True}, "ErrorResponse", 400),
    Case("/v1/completions", TEXT | {"model": "other"}, "ErrorResponse", 404),
    Case("/v1/responses", RESPONSE | {"input": []}, "ErrorResponse", 400),
    Case("/v1/embeddings", {"input": ""}, "ErrorResponse", 400),
    Case("/v1/nothing", {}, "ErrorResponse", 404),
    Case("/v1/messages", MESSAGE | {"max_tokens": 0}, "anthropic.ErrorResponse", 400),
]

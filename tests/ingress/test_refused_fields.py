"""Each wrong field of chat, completions, tokenize and detokenize is refused with its own name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT
from tests.ingress.refused import CHAT_PATH, TEXT_PATH, error_of


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def call(**function: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", **function}}])


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"zzz": 1}, "zzz"),
    ({"temprature": 1}, "temprature"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"guided": "a"}}, "structured_outputs.guided"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    ({"model": 3}, "model"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1, -1]}, "logprob_token_ids[1]"),
    ({"truncation_side": "middle", "truncate_prompt_tokens": 5}, "truncation_side"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": -0.01}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 1}, "stop"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x", "x" * 2049]}, "bad_words[1]"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), "wrong, but not looked at")}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"user": 1}, "user"),
    ({"x" * 100_000: 1}, "x" * 63 + "…"),
]
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    (user(None), "messages[0].content"),
    (user(5), "messages[0].content"),
    (user([]), "messages[0].content"),
    (user(["x"]), "messages[0].content[0]"),
    (user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[0].content[1].type"),
    (user("x", name=1), "messages[0].name"),
    (assistant(content="x", function_call={"name": "f", "arguments": ""}), "messages[0].function_call"),
    (assistant(content="x", provider_specific_fields="no"), "messages[0].provider_specific_fields"),
    (assistant(content="x", tool_calls="f"), "messages[0].tool_calls"),
    (assistant(tool_calls=["f"]), "messages[0].tool_calls[0]"),
    (assistant(tool_calls=[{"id": "1", "type": "custom"}]), "messages[0].tool_calls[0].type"),
    (assistant(tool_calls=[{"id": "1", "type": "function"}]), "messages[0].tool_calls[0].function"),
    (call(), "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "tool_choice.function.name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools"}, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tool_choice.type",
    ),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"service_tier": "x"}, "service_tier"),
    ({"prompt_cache_retention": "x"}, "prompt_cache_retention"),
    ({"verbosity": "x"}, "verbosity"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"echo": 1}, "echo"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"messages": [{"role": "asistant", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"best_of": 1}, "best_of"),
    ({"prompt": "x"}, "prompt"),
    ({"suffix": None}, "suffix"),
]
ONLY_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [[1], [1, None]]}, "prompt[1][1]"),
    ({"prompt": [[1], 2]}, "prompt[1]"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 1024, "n": 128}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]
CASES = [
    *((CHAT_PATH, CHAT | fields, param) for fields, param in SHARED + ONLY_CHAT),
    *((TEXT_PATH, TEXT | fields, param) for fields, param in SHARED + ONLY_TEXT),
    (CHAT_PATH, {"model": "org/fake-model"}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"text": "a"}, "text"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [9999]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_a_wrong_field_is_named(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(path, json=body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert llm.calls == []


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/completions", {"prompt": "Hi", "logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/responses", {"input": "Hi", "top_logprobs": -1}, "top_logprobs"),
    ],
)
async def test_the_whole_vocabulary_is_refused_with_its_reason(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(path, json={"model": "org/fake-model"} | body))
    assert error["param"] == param
    assert "the whole vocabulary, is not supported; use at most 20" in error["message"]

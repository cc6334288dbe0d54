"""A table of bad inputs: the fields of each endpoint by kind, and the wrong values of each kind.

To add an endpoint, add an entry to ENDPOINTS with its body class, a valid body, and its fields. ``test_bad_inputs``
checks that every field of the class has an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.completions import CompletionRequest
from raylm.ingress.openai.embeddings import EmbeddingRequest
from raylm.ingress.openai.models import LoadAdapterRequest, UnloadAdapterRequest
from raylm.ingress.openai.scores import RerankRequest, ScoreRequest
from raylm.ingress.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tests.ingress.wrong_values import (
    BOOLEAN,
    CHAT,
    CHOICE,
    COUNT,
    GENERATION,
    IDS,
    INTEGER,
    MESSAGES,
    OBJECT,
    POOLING,
    PROMPTS,
    STRING,
    TEXT,
    TEXTS,
    TOOLS,
    Endpoint,
)

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(
        ChatCompletionRequest,
        CHAT,
        GENERATION | {
            "messages": MESSAGES,
            "max_completion_tokens": [*COUNT, 10**7],
            "logprobs": BOOLEAN,
            "top_logprobs": [*INTEGER, -1, 21, 1],
            "tools": TOOLS,
            "tool_choice": [5, "sometimes", [1], {"type": "nonsense"}, "required"],
            "parallel_tool_calls": BOOLEAN,
            "reasoning_effort": CHOICE,
            "thinking_token_budget": [*INTEGER, -1],
            "include_reasoning": BOOLEAN,
            "echo": BOOLEAN,
            "add_generation_prompt": BOOLEAN,
            "continue_final_message": BOOLEAN,
            "chat_template_kwargs": [*OBJECT, {"messages": []}, {"tokenize": True}, {"_x": 1}],
            "metadata": [*OBJECT, {"a": 1}, {str(i): "" for i in range(17)}, {"x" * 65: ""}],
            "safety_identifier": [*STRING, "x" * 65],
            "prompt_cache_key": STRING,
            "prompt_cache_retention": CHOICE,
            "service_tier": CHOICE,
            "modalities": [*TEXTS, ["audio"]],
            "store": BOOLEAN,
            "verbosity": CHOICE,
        },
        ("messages",),
        {"max_tokens": ("messages", "max_completion_tokens"), "max_completion_tokens": ("messages",)},
    ),
    "/v1/completions": Endpoint(
        CompletionRequest,
        TEXT,
        GENERATION | {
            "prompt": [*PROMPTS, "word " * 50_000, ""],
            "logprobs": [*INTEGER, -1, 21],
            "echo": BOOLEAN,
            "best_of": [*INTEGER, 0, 129],
        },
        ("prompt",),
        {"max_tokens": ("prompt",)},
    ),
    "/v1/embeddings": Endpoint(
        EmbeddingRequest,
        {"model": "embedded", "input": "Hi"},
        POOLING | {
            "input": [*PROMPTS, "word " * 50_000, ""],
            "encoding_format": CHOICE,
            "dimensions": [*INTEGER, 0, -1, 10**6],
            "normalize": BOOLEAN,
        },
        ("input",),
    ),
    "/score": Endpoint(
        ScoreRequest,
        {"model": "embedded", "text_1": "a", "text_2": ["b", "c"]},
        POOLING | {"text_1": [*TEXTS, "", [], ["a"] * 3], "text_2": [*TEXTS, "", [], ["a"] * 1025]}
        | {"queries": [*TEXTS, "", []], "documents": [*TEXTS, "", []]},
        ("text_1", "text_2"),
        {"queries": ("text_1", "documents"), "documents": ("text_1", "queries")},
    ),
    "/rerank": Endpoint(
        RerankRequest,
        {"model": "embedded", "query": "a", "documents": ["b", "c"]},
        POOLING | {
            "query": [*STRING, ""],
            "documents": [*TEXTS, "x", [], [""]],
            "top_n": [*INTEGER, -1],
            "return_documents": BOOLEAN,
            "max_tokens_per_doc": [*INTEGER, -1],
        },
        ("query", "documents"),
    ),
    "/tokenize": Endpoint(
        TokenizeRequest,
        {"messages": CHAT["messages"]},
        {
            "model": STRING,
            "prompt": [*STRING, "beside messages"],
            "add_special_tokens": BOOLEAN,
            "return_token_strs": BOOLEAN,
            "messages": MESSAGES[:-1],
            "tools": TOOLS,
            "add_generation_prompt": BOOLEAN,
            "continue_final_message": BOOLEAN,
            "chat_template_kwargs": [*OBJECT, {"messages": []}],
        },
    ),
    "/v1/load_lora_adapter": Endpoint(
        LoadAdapterRequest,
        {"lora_name": "mine", "lora_path": "mine"},
        {"lora_name": [*STRING, "", "a b", "x" * 129], "lora_path": [*STRING, "", "x" * 4097, "../..", "/etc", "a\0b"]},
        ("lora_name", "lora_path"),
    ),
    "/v1/unload_lora_adapter": Endpoint(
        UnloadAdapterRequest,
        {"lora_name": "mine"},
        {"lora_name": [*STRING, "", "a b", "x" * 129, "never-loaded"]},
        ("lora_name",),
    ),
    "/detokenize": Endpoint(
        DetokenizeRequest, {"tokens": [300]}, {"model": STRING, "tokens": [*IDS, [10**6]]}, ("tokens",)
    ),
}  # fmt: skip

for _api in ("anthropic", "responses"):
    ENDPOINTS |= import_module(f"tests.ingress.{_api}.bad_inputs").ENDPOINTS


@dataclass(frozen=True)
class BadInput:
    """A body for ``path`` that must be refused with one of the names ``params`` (with any name, if there are none)."""

    path: str
    body: Any
    params: tuple[str, ...]


def bad_inputs() -> Iterator[BadInput]:
    """All bad inputs of the table."""
    for path, endpoint in ENDPOINTS.items():
        for name, wrong in endpoint.fields.items():
            for value in wrong:
                yield BadInput(path, endpoint.good | {name: value}, (name, *endpoint.also.get(name, ())))
        for name in endpoint.required:
            without = {key: value for key, value in endpoint.good.items() if key != name}
            yield BadInput(path, without, (name,))
        yield from (BadInput(path, endpoint.good | {name: 1}, (name,)) for name in ("zzz", "temprature"))
        yield BadInput(path, endpoint.good | {"x" * 100_000: 1}, ("x" * 63 + "…",))
        yield BadInput(path, endpoint.good | {"model": "another"}, ("model",))


RAW: list[bytes] = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff", b'{"a": NaN}', b'{"temperature": Infinity}', b'{"a": 1e999}',
    b'{"a": "\\ud800"}', b'{"a": 1,}', b"\xef\xbb\xbf{}", b'{"a":' * 5000, b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    b'{"a":[' + b"[]," * 600_000 + b"1]}",
]  # fmt: skip

"""A table of bad inputs: for each endpoint its fields by kind, and for each kind what it is not.

An endpoint joins by an entry in ENDPOINTS: its body class, a good body, and its fields. ``test_bad_inputs`` sees to it
that every field of the class is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raylm.ingress.anthropic.body import CountTokensRequest, MessagesRequest
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.completions import CompletionRequest
from raylm.ingress.openai.embeddings import EmbeddingRequest
from raylm.ingress.openai.fields import Body
from raylm.ingress.openai.models import LoadAdapterRequest, UnloadAdapterRequest
from raylm.ingress.openai.scores import RerankRequest, ScoreRequest
from raylm.ingress.openai.tokenize import DetokenizeRequest, TokenizeRequest
from raylm.ingress.responses.body import ResponsesRequest

STRING: list[Any] = [5, True, [], {}]
INTEGER: list[Any] = ["1", 1.5, True, [], {}, 10**30]
NUMBER: list[Any] = ["1", True, [], {}]
BOOLEAN: list[Any] = [1, "true", [], {}]
OBJECT: list[Any] = [5, "x", [1], True]
TEXTS: list[Any] = [5, {}, True, ["a", 1], [None], [[]]]
OBJECTS: list[Any] = [5, "x", {}, [5], [None], [[]]]
IDS: list[Any] = [5, "x", {}, [1, "2"], [-1], [1.0], [True], [2**40]]
CHOICE: list[Any] = [5, True, [], "nonsense"]
FREE: list[Any] = []  # anything is taken, or the field is another's to describe
PROMPTS: list[Any] = [
    5,
    {},
    [],
    [1, "a"],
    ["a", 1],
    [True],
    [1.0],
    [[]],
    [[1], [1, None]],
    [[1], 2],
    [10**6],
    ["a"] * 3000,
]

SALT = [*STRING, "", "x" * 129]
REQUEST_ID = [*STRING, "a b", "x" * 129, "ä"]
PRIORITY = [*INTEGER, 1, 2**40]
COUNT = [*INTEGER, 0, -1]
STOP = [*TEXTS, "", ["a", ""], ["a"] * 5, ["x" * 3000]]
BIAS = [*OBJECT, {"x": 1}, {"-1": 1}, {"1": "1"}, {"1000000": 1}, {str(i): 1 for i in range(1025)}]
TOOLS = [
    *OBJECTS,
    [{"type": "custom"}], [{"type": "function"}], [{"type": "function", "function": {}}],
    [{"type": "function", "function": {"name": 5}}],
    [{"type": "function", "function": {"name": "f", "parameters": 1}}],
    [{"type": "function", "function": {"name": "f", "zzz": 1}}],
]  # fmt: skip
MESSAGES = [
    *OBJECTS,
    [], [{}], [{"role": "robot", "content": "x"}], [{"role": 1, "content": "x"}], [{"role": "user"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": []}], [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "user", "content": [{"type": "nonsense"}]}],
    [{"role": "user", "content": "x", "zzz": 1}], [{"role": "assistant", "content": "x", "tool_calls": "f"}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": "word " * 50_000}],
]  # fmt: skip
CLAUDES_MESSAGES = [
    *OBJECTS,
    [], [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{"type": "nonsense"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": "x", "zzz": 1}],
]  # fmt: skip

SAMPLING: dict[str, list[Any]] = {
    "temperature": [*NUMBER, -0.1, 2.1],
    "top_p": [*NUMBER, 0, -1, 1.1],
    "top_k": [*INTEGER, -2, 2**40],
    "min_p": [*NUMBER, -0.1, 1.1],
    "presence_penalty": [*NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NUMBER, 0, -1],
    "seed": [*INTEGER, 2**63],
    "min_tokens": [*INTEGER, -1, 2**40],
    "stop": STOP,
    "stop_token_ids": [*IDS, [10**6], [1] * 1025],
    "ignore_eos": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "spaces_between_special_tokens": BOOLEAN,
    "logit_bias": BIAS,
    "allowed_token_ids": [*IDS, [10**6], []],
    "bad_words": [5, {}, True, ["a", 1], [" "], [""], ["x"] * 129, ["x" * 3000]],
    "priority": PRIORITY,
    "cache_salt": SALT,
}
GENERATION: dict[str, list[Any]] = SAMPLING | {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": [*OBJECT, {"include_usage": True}, {"zzz": True}],
    "n": [*INTEGER, 0, -1, 129],
    "max_tokens": [*INTEGER, -1, 10**7],
    "prompt_logprobs": [*INTEGER, -1, 21],
    "truncate_prompt_tokens": [*INTEGER, 0, -2],
    "return_token_ids": BOOLEAN,
    "request_id": REQUEST_ID,
    "user": STRING,
    "response_format": [
        *OBJECT, {"type": "xml"}, {}, {"type": "json_schema"}, {"type": "text", "x": 1},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}},
    ],
    "structured_outputs": [
        *OBJECT, {}, {"regex": 5}, {"regex": "a", "json": {}}, {"choice": []}, {"choice": [1]}, {"zzz": 1},
        {"grammar": []}, {"json": 5},
    ],
}  # fmt: skip
POOLING: dict[str, list[Any]] = {
    "model": STRING,
    "pooling": [*CHOICE, "max"],
    "truncate_prompt_tokens": COUNT,
    "priority": PRIORITY,
    "cache_salt": SALT,
    "request_id": REQUEST_ID,
    "user": STRING,
}


@dataclass(frozen=True)
class Endpoint:
    """``fields`` maps names to wrong values; ``also`` says under which other names a wrong value may be reported."""

    body: type[Body]
    good: dict[str, Any]
    fields: dict[str, list[Any]]
    required: tuple[str, ...] = ()
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)


CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": "embedded", "prompt": "Hi", "max_tokens": 4}
CLAUDE: dict[str, list[Any]] = {
    "model": STRING,
    "messages": CLAUDES_MESSAGES,
    "system": [5, True, [5], [{"type": "nonsense"}]],
    "tools": [*OBJECTS, [{}], [{"name": 5, "input_schema": {}}]],
    "tool_choice": [*OBJECT, {}, {"type": "nonsense"}],
    "thinking": [*OBJECT, {}, {"type": "nonsense"}],
    "output_config": [*OBJECT, {"zzz": 1}],
    "cache_control": OBJECT,
}
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
            "add_generation_prompt": BOOLEAN,
            "continue_final_message": BOOLEAN,
            "chat_template_kwargs": [*OBJECT, {"messages": []}, {"tokenize": True}, {"_x": 1}],
            "metadata": [*OBJECT, {"a": 1}, {str(i): "" for i in range(17)}, {"x" * 65: ""}],
            "safety_identifier": [*STRING, "x" * 65],
            "prompt_cache_key": STRING,
            "prompt_cache_retention": CHOICE,
            "service_tier": CHOICE,
            "modalities": [*TEXTS, ["audio"]],
            "store": [*BOOLEAN, True],
        },
        ("model", "messages"),
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
        ("model", "prompt"),
        {"max_tokens": ("prompt",)},
    ),
    "/v1/responses": Endpoint(
        ResponsesRequest,
        {"model": "embedded", "input": "Hi", "max_output_tokens": 4},
        SAMPLING | {
            "model": STRING,
            "input": [5, True, {}, [5], [{}], [{"type": "nonsense"}], [{"role": "robot", "content": "x"}]],
            "instructions": STRING,
            "previous_response_id": [*STRING, "x" * 129],
            "stream": BOOLEAN,
            "stream_options": [*OBJECT, {"zzz": 1}],
            "store": BOOLEAN,
            "background": BOOLEAN,
            "max_output_tokens": [*COUNT, 10**7],
            "top_logprobs": [*INTEGER, -1, 21],
            "include": [*TEXTS, ["nonsense"]],
            "text": [*OBJECT, {"zzz": 1}, {"format": 5}],
            "reasoning": [*OBJECT, {"zzz": 1}, {"effort": 5}],
            "tools": [*OBJECTS, [{}], [{"type": "nonsense"}]],
            "tool_choice": [5, "sometimes", [1], {"type": "nonsense"}],
            "parallel_tool_calls": BOOLEAN,
            "truncation": CHOICE,
            "metadata": [*OBJECT, {"a": 1}],
            "user": STRING,
            "safety_identifier": STRING,
            "prompt_cache_key": STRING,
            "prompt_cache_retention": CHOICE,
            "service_tier": CHOICE,
            "request_id": REQUEST_ID,
            "chat_template_kwargs": [*OBJECT, {"messages": []}],
            "structured_outputs": GENERATION["structured_outputs"],
            "thinking_token_budget": [*INTEGER, -1],
        },
        ("model", "input"),
        {"max_output_tokens": ("input",)},
    ),
    "/v1/messages": Endpoint(
        MessagesRequest,
        CHAT,
        CLAUDE | {
            "max_tokens": [*COUNT, 10**7],
            "stream": BOOLEAN,
            "temperature": SAMPLING["temperature"],
            "top_p": SAMPLING["top_p"],
            "top_k": [*INTEGER, -1],
            "stop_sequences": [5, {}, True, ["a", 1], [""]],
            "metadata": [*OBJECT, {"zzz": 1}],
            "service_tier": CHOICE,
        },
        ("model", "messages", "max_tokens"),
        {"max_tokens": ("messages", "completion")},
    ),
    "/v1/messages/count_tokens": Endpoint(
        CountTokensRequest, {"model": "embedded", "messages": CHAT["messages"]}, CLAUDE, ("model", "messages")
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
        ("model", "input"),
    ),
    "/score": Endpoint(
        ScoreRequest,
        {"model": "embedded", "text_1": "a", "text_2": ["b", "c"]},
        POOLING | {"text_1": [*TEXTS, "", [], ["a"] * 3], "text_2": [*TEXTS, "", [], ["a"] * 1025]},
        ("model", "text_1", "text_2"),
    ),
    "/rerank": Endpoint(
        RerankRequest,
        {"model": "embedded", "query": "a", "documents": ["b", "c"]},
        POOLING | {
            "query": [*STRING, ""],
            "documents": [*TEXTS, "x", [], [""]],
            "top_n": [*INTEGER, -1],
            "return_documents": BOOLEAN,
        },
        ("model", "query", "documents"),
    ),
    "/tokenize": Endpoint(
        TokenizeRequest,
        {"messages": CHAT["messages"]},
        {
            "model": STRING,
            "prompt": [*STRING, "beside messages"],
            "add_special_tokens": [*BOOLEAN, True],
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


@dataclass(frozen=True)
class BadInput:
    """A body for ``path`` that must be refused, under one of the names ``params`` (none: whatever it is)."""

    path: str
    body: Any
    params: tuple[str, ...]


def bad_inputs() -> Iterator[BadInput]:
    """All of the table."""
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

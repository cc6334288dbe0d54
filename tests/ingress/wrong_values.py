"""Kinds of fields with the wrong values of each, for the bodies of all APIs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raylm.ingress.openai.fields import Body

STRING: list[Any] = [5, True, [], {}]
INTEGER: list[Any] = ["1", 1.5, True, [], {}, 10**30]
NUMBER: list[Any] = ["1", True, [], {}]
BOOLEAN: list[Any] = [1, "true", [], {}]
OBJECT: list[Any] = [5, "x", [1], True]
TEXTS: list[Any] = [5, {}, True, ["a", 1], [None], [[]]]
OBJECTS: list[Any] = [5, "x", {}, [5], [None], [[]]]
IDS: list[Any] = [5, "x", {}, [1, "2"], [-1], [1.0], [True], [2**40]]
CHOICE: list[Any] = [5, True, [], "nonsense"]
FREE: list[Any] = []  # any value is accepted, or another field's table describes it
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
    [{"role": "assistant", "content": "x", "tool_calls": "f"}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": "word " * 50_000}],
]  # fmt: skip
SAMPLING: dict[str, list[Any]] = {
    "temperature": [*NUMBER, -0.1, 2.1],
    "top_p": [*NUMBER, 0, -1, 1.1],
    "top_k": [*INTEGER, -2, 2**40],
    "min_p": [*NUMBER, -0.1, 1.1],
    "presence_penalty": [*NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NUMBER, 0, -1],
    "seed": [*INTEGER, 2**63, 2**64, -(2**63) - 1],
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
    "truncation_side": [*CHOICE, "left"],
    "logprob_token_ids": [*IDS, [], [5], [10**6], list(range(129))],
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    "add_special_tokens": BOOLEAN,
    "request_id": REQUEST_ID,
    "user": STRING,
    "response_format": [
        *OBJECT, {"type": "xml"}, {}, {"type": "json_schema"}, {"type": "text", "x": 1},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}},
    ],
    "structured_outputs": [
        *OBJECT, {}, {"regex": 5}, {"regex": "a", "json": {}}, {"choice": []}, {"choice": [1]}, {"zzz": 1},
        {"grammar": []}, {"json": 5}, {"json": False},
    ],
}  # fmt: skip
POOLING: dict[str, list[Any]] = {
    "model": STRING,
    "pooling": [*CHOICE, "max"],
    "truncate_prompt_tokens": [*INTEGER, 0, -2],
    "truncation_side": [*CHOICE, "left"],
    "priority": PRIORITY,
    "cache_salt": SALT,
    "request_id": REQUEST_ID,
    "user": STRING,
}


@dataclass(frozen=True)
class Endpoint:
    """``fields`` maps names to wrong values. ``also`` has other names under which an error may be reported."""

    body: type[Body]
    good: dict[str, Any]
    fields: dict[str, list[Any]]
    required: tuple[str, ...] = ()
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)


CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": "embedded", "prompt": "Hi", "max_tokens": 4}

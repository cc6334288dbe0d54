"""The requests of event_loop.py: bodies that are large in different ways, for each endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WORDS = "the quick brown fox jumps over a lazy dog and back "
LONG_TEXT = (WORDS * 160)[:8_000]
CHOICES: dict[str, Any] = {"n": 128, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}

Body = dict[str, Any] | str  # str: already JSON, where Python's own encoder would be too slow


@dataclass(frozen=True)
class Case:
    """One body, which is made when it is needed, and the expected status.

    413 means that the body is not parsed. 400 means here that the prompt is longer than the context.
    """

    name: str
    make: Callable[[], Body]
    status: int = 200


@dataclass(frozen=True)
class Endpoint:
    """A path and its cases by name."""

    name: str
    path: str
    cases: tuple[Case, ...]


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "max_tokens": 1} | fields


def talk(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields


def messages(count: int) -> dict[str, Any]:
    return talk("a") | {"messages": [{"role": "user", "content": "a"}] * count}


def with_prompt(prompt: str) -> str:
    """A body of /v1/completions for a prompt that is already JSON."""
    return json.dumps(text(prompt="@")).replace('"@"', prompt)


def tool(properties: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


CHAT = (
    Case("300 kB of text", lambda: talk(WORDS * 6_000)),
    Case("30 MB of text", lambda: talk(WORDS * 600_000), 400),
    Case("30 MB of Chinese", lambda: talk("语言模型" * 2_500_000), 400),
    Case("600,000 messages", lambda: messages(600_000), 413),
    Case("100,000 messages", lambda: messages(100_000), 400),
    Case("8,000 messages", lambda: messages(8_000)),
    Case("100,000 text parts", lambda: talk([{"type": "text", "text": "a"}] * 100_000), 400),
    Case("tools of 3 MB", lambda: talk("a", tools=[tool(1_200)] * 100), 400),
    Case("kwargs of 500,000 values", lambda: talk("a", chat_template_kwargs={"a": [1] * 500_000})),
    Case("128 choices of 200 tokens, 20 logprobs", lambda: talk("a", **CHOICES)),
    Case("the same streamed", lambda: talk("a", **CHOICES, stream=True)),
    Case("128 choices of 1,000 tokens", lambda: talk("a", n=128, max_tokens=1_000)),
    Case("128 bad words of 2,048", lambda: talk("a", bad_words=[f"{i} {WORDS * 50}"[:2_048] for i in range(128)])),
    Case("262,144 allowed ids", lambda: talk("a", allowed_token_ids=[5] * 262_144)),
)
COMPLETIONS = (
    Case("1,024 prompts of 8,000 characters", lambda: text(prompt=[LONG_TEXT] * 1_024)),
    Case("1,024 prompts of 100 ids, n 4", lambda: text(prompt=[[5] * 100] * 1_024, n=4)),
    Case("500,000 ids in 500 prompts", lambda: text(prompt=[[5] * 1_000] * 500)),
    Case("15,000,000 ids", lambda: with_prompt("[5" + ",5" * 14_999_999 + "]"), 413),
    Case(
        "echo, 100,000 ids, 20 logprobs",
        lambda: text(prompt=[5] * 100_000, echo=True, logprobs=20, prompt_logprobs=20),
    ),
    Case("30 MB of text", lambda: text(prompt=WORDS * 600_000), 400),
)
TOKENIZE = (
    Case("4 MB", lambda: {"prompt": WORDS * 80_000}),
    Case("4 MB, token_strs", lambda: {"prompt": WORDS * 80_000, "return_token_strs": True}),
    Case("4 MB of digits", lambda: {"prompt": "7" * 4_000_000}),
)
DETOKENIZE = (Case("500,000 ids", lambda: {"tokens": [500] * 500_000}),)
EMBEDDINGS = (Case("1,024 texts of 8,000 characters", lambda: {"model": "embedded", "input": [LONG_TEXT] * 1_024}),)
ANY = (
    Case("2,000,000 unknown fields", lambda: "{" + ",".join(f'"f{i}":1' for i in range(2_000_000)) + "}", 413),
    Case("4,000,000 empty arrays", lambda: with_prompt("[[]" + ",[]" * 4_000_000 + "]"), 413),
)
ENDPOINTS = (
    Endpoint("chat", "/v1/chat/completions", CHAT),
    Endpoint("completions", "/v1/completions", COMPLETIONS),
    Endpoint("tokenize", "/tokenize", TOKENIZE),
    Endpoint("detokenize", "/detokenize", DETOKENIZE),
    Endpoint("embeddings", "/v1/embeddings", EMBEDDINGS),
    Endpoint("any", "/v1/completions", ANY),
)


def chosen(only: str) -> Iterator[tuple[str, str, Case]]:
    """(name, path, case) of all cases whose name contains ``only``."""
    for endpoint in ENDPOINTS:
        for case in endpoint.cases:
            name = f"{endpoint.name}: {case.name}"
            if only in name:
                yield name, endpoint.path, case

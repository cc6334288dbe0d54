"""Counts of prompt tokens written to and read from the prefix cache, in messages of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.embedded_server import EmbeddedServer
from tests.ingress.harness import typed_events

PATH = "/v1/messages"
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with EmbeddedServer() as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


def body(text: str, *more: str) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate((text, *more))]
    return {"max_tokens": 4, "messages": turns}


def usage_of(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(PATH, json=request)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    counted = {name: value for name, value in request.items() if name not in ("max_tokens", "stream")}
    whole = client.post(f"{PATH}/count_tokens", json=counted).json()["input_tokens"]
    created, read = usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
    assert usage["input_tokens"] + created + read == whole
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0}
    return usage


def test_what_a_message_creates_the_next_one_reads(client: httpx.Client) -> None:
    text = "The cache of the first test. " * 20
    first = usage_of(client, body(text) | CACHED)
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] > 50
    assert 0 < first["input_tokens"] <= 16, "at most one block of the prompt is not cached"
    again = usage_of(client, body(text) | CACHED)
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert again["cache_creation_input_tokens"] == 0
    longer = usage_of(client, body(text, "I see.", "And what comes after the first test? " * 20) | CACHED)
    assert longer["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert longer["cache_creation_input_tokens"] > 50


@pytest.mark.parametrize("where", ["system", "tools", "messages"])
def test_a_cache_mark_of_any_part_counts(client: httpx.Client, where: str) -> None:
    request = body(f"Part {where}. " * 20)
    if where == "system":
        request["system"] = [{"type": "text", "text": "Be kind."} | CACHED]
    elif where == "tools":
        request["tools"] = [{"name": "f", "input_schema": {"type": "object"}} | CACHED]
    else:
        request["messages"][0]["content"] = [{"type": "text", "text": request["messages"][0]["content"]} | CACHED]
    assert usage_of(client, request)["cache_creation_input_tokens"] > 30


def test_without_a_mark_written_tokens_are_input_tokens(client: httpx.Client) -> None:
    text = "Unmarked words of a prompt. " * 20
    usage = usage_of(client, body(text))
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] > 50
    assert usage_of(client, body(text))["cache_read_input_tokens"] > 50


def test_a_stream_counts_alike_at_its_start_and_end(client: httpx.Client) -> None:
    found = typed_events(client.post(PATH, json=body("Streamed. " * 30) | CACHED | {"stream": True}).text)
    start = found[0]["message"]["usage"]
    (delta,) = [event for event in found if event["type"] == "message_delta"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [start[name] for name in names] == [delta["usage"][name] for name in names]
    assert start["cache_creation_input_tokens"] == start["cache_creation"]["ephemeral_5m_input_tokens"] > 30


def test_without_a_prefix_cache_nothing_is_written() -> None:
    with (
        EmbeddedServer(cache={"num_blocks": 512, "prefix_caching": False}) as url,
        httpx.Client(base_url=url) as client,
    ):
        usage = client.post(PATH, json=body("No cache. " * 20) | CACHED, timeout=300).json()["usage"]
        assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)

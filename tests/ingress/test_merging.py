"""An answer does not depend on how its tokens are batched. The engine draws texts that the test wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import orjson
import pytest

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from tests.ingress.harness import client_of, events, typed_events
from tests.ingress.writing_engine import SAID, WritingEngine

FUNCTION = {"name": "f", "parameters": {}}
ASK = [{"role": "user", "content": "Hi"}]
ANSWERS = range(len(SAID))
WAYS = range(8)  # seeds for the batches of tokens


class Server:
    """The app with one engine."""

    def __init__(self, client: httpx.AsyncClient, engine: WritingEngine) -> None:
        self._client, self._engine = client, engine

    async def ask(self, path: str, body: dict[str, Any], answer: int, way: int) -> str:
        self._engine.first, self._engine.random = answer, Random(way)
        found = await self._client.post(path, json={"model": "embedded"} | body)
        assert found.status_code == 200, found.text
        return found.text


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    llm, engine = AsyncLLM(Config(model="embedded")), WritingEngine("e", Random(0))
    llm.add_engine(engine)
    async with client_of(build_asgi_app(llm, Config(model="embedded"))) as client:
        yield Server(client, engine)
    await llm.stop()


def part_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """The content of a response's item: its text with log-probabilities, or the arguments of a call."""
    (part,) = item.get("content") or ({},)
    return item["type"], part.get("text", item.get("arguments")), part.get("logprobs")


@pytest.mark.parametrize("answer", ANSWERS)
async def test_items_of_a_response_and_their_logprobs(server: Server, answer: int) -> None:
    body = {
        "input": "Hi", "max_output_tokens": 400, "top_logprobs": 1, "reasoning": {"effort": "low"},
        "tools": [{"type": "function"} | FUNCTION], "stop": ["END"],
    }  # fmt: skip
    found = []
    for way in WAYS:
        streamed = typed_events(await server.ask("/v1/responses", body | {"stream": True}, answer, way))
        response = streamed[-1]["response"]
        found.append([part_of(item) for item in response["output"]])
        told: dict[int, list[str]] = {}
        for event in streamed:
            if event["type"] == "response.output_text.delta":
                told.setdefault(event["output_index"], []).extend(entry["token"] for entry in event["logprobs"])
        kept = {
            place: [entry["token"] for entry in logprobs]
            for place, (_, _, logprobs) in enumerate(found[-1])
            if logprobs
        }
        assert told == kept
        whole = orjson.loads(await server.ask("/v1/responses", body, answer, way))
        assert [part_of(item) for item in whole["output"]] == found[-1]
    assert all(parts == found[0] for parts in found)
    for kind, text, logprobs in found[0]:
        if kind == "message" and "END" not in SAID[answer]:
            raw = bytes(byte for entry in logprobs for byte in entry["bytes"]).decode()
            assert "".join(raw.split()) == "".join(text.split())


@pytest.mark.parametrize("answer", ANSWERS)
async def test_blocks_of_a_message(server: Server, answer: int) -> None:
    body = {
        "messages": ASK, "max_tokens": 400, "thinking": {"type": "enabled", "budget_tokens": 100},
        "tools": [{"name": "f", "input_schema": {}}],
    }  # fmt: skip
    found = []
    for way in WAYS:
        content = orjson.loads(await server.ask("/v1/messages", body, answer, way))["content"]
        found.append([[block.get(name) for name in ("type", "thinking", "text", "input")] for block in content])
        streamed = typed_events(await server.ask("/v1/messages", body | {"stream": True}, answer, way))
        starts = [event["content_block"]["type"] for event in streamed if event["type"] == "content_block_start"]
        assert starts == [kind for kind, *_ in found[-1]]
    assert all(blocks == found[0] for blocks in found)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_logprobs_of_a_chat_completion(server: Server, answer: int) -> None:
    """The log-probabilities include those of reasoning and calls."""
    body = {
        "messages": ASK, "max_tokens": 400, "logprobs": True, "reasoning_effort": "low",
        "tools": [{"type": "function", "function": FUNCTION}],
    }  # fmt: skip
    found = []
    for way in WAYS:
        (choice,) = orjson.loads(await server.ask("/v1/chat/completions", body, answer, way))["choices"]
        found.append(choice["logprobs"]["content"])
        chunks = events(await server.ask("/v1/chat/completions", body | {"stream": True}, answer, way))[:-1]
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for some in logprobs if some for entry in some["content"]] == found[-1]
    assert all(content == found[0] for content in found)

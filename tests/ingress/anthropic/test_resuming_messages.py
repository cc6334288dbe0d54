"""Streams of messages that are cut after any event and resumed with its id."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from random import Random
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import Surroundings, build_asgi_app
from raylm.ingress.anthropic.blocks import SIGNATURE
from tests.ingress.harness import client_of, served
from tests.ingress.test_resuming import RESUMABLE, SECRET, Stack
from tests.ingress.writing_engine import SAID, WritingEngine

PATH = "/v1/messages"
TOOLS = [{"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {}}}]
BODY: dict[str, Any] = {
    "model": "embedded", "max_tokens": 400, "stream": True, "messages": [{"role": "user", "content": "Hi"}],
}  # fmt: skip
BODIES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "thinking": {"type": "adaptive"}},
    {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"max_tokens": 9, "tools": TOOLS},
    {"stop_sequences": ["END", "EN\n"], "thinking": {"type": "adaptive"}},
]
Told = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.close()


def events(stack: Stack, body: dict[str, Any], event_id: str = "", *, said: int) -> Told:
    """(id, event) of each event of an answer from one of the two ingresses. The engines draw SAID[said]."""
    for engine in stack.engines:
        engine.first = said
    return [(event_id, orjson.loads(data)) for event_id, data in stack.events(PATH, body, event_id)]


def joined(told: Told) -> dict[str, Any]:
    """The message as a client joins it from a stream.

    Block events must be in order, and other events must come once.
    """
    kinds = [event["type"] for _, event in told]
    once = [kind for kind in kinds if not kind.startswith("content_block")]
    assert once == ["message_start", "ping", "message_delta", "message_stop"]
    assert kinds[:2] == once[:2]
    assert kinds[-2:] == once[2:]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for _, event in told[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            blocks.append({"pieces": "", **event["content_block"]})
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            if kind == "signature_delta":
                assert (blocks[-1]["type"], blocks[-1]["signature"]) == ("thinking", "")
                blocks[-1]["signature"] = piece
                continue
            assert (
                kind
                == {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}[
                    blocks[-1]["type"]
                ]
            )
            blocks[-1]["pieces"] += piece
        if event["type"] == "content_block_stop":
            is_open = False
            assert blocks[-1]["type"] != "thinking" or blocks[-1]["signature"] == SIGNATURE
    assert not is_open
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(calls)) == len(calls)
    found = [(block["type"], block.get("name"), block["pieces"]) for block in blocks]
    end = told[-2][1]
    return {"blocks": found, "stop": end["delta"], "output_tokens": end["usage"]["output_tokens"]}


CUTS = st.lists(st.floats(0, 1), min_size=1, max_size=4)  # fractions of the remaining events


@given(fields=st.sampled_from(BODIES), said=st.integers(0, len(SAID) - 1), luck=st.integers(), cuts=CUTS)
@settings(max_examples=30, deadline=None)
def test_a_message_goes_on_behind_any_event(
    stack: Stack, fields: dict[str, Any], said: int, luck: int, cuts: list[float]
) -> None:
    stack.random.seed(luck)
    body = BODY | fields
    going_on = undisturbed = events(stack, body, said=said)
    told: Told = []
    for cut in cuts:
        told += going_on[: 1 + int(cut * len(going_on))]
        if told[-1][1]["type"] == "message_stop":
            break
        going_on = events(stack, body, told[-1][0], said=said)
    else:
        told += going_on
    assert joined(told) == joined(undisturbed)


def test_every_event_is_a_place_to_go_on_from(stack: Stack) -> None:
    body = BODY | {"tools": TOOLS, "thinking": {"type": "adaptive"}}
    undisturbed = events(stack, body, said=2)
    assert [kind for kind, _, _ in joined(undisturbed)["blocks"]].count("tool_use") == 2
    ids = [event_id for event_id, _ in undisturbed]
    assert all(len(event_id) <= 80 for event_id in ids)
    assert len(set(ids)) == len(ids) - 1  # message_stop has the id of the event before it
    for place, event_id in enumerate(ids[:-2], 1):
        rest = events(stack, body, event_id, said=2)
        assert joined(undisturbed[:place] + rest) == joined(undisturbed)
    for event_id in ids[-2:]:
        assert events(stack, body, event_id, said=2) == undisturbed[-1:]


def error_of(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error["type"] == "error"
    assert "told" in error["error"]["message"] or "Last-Event-ID" in error["error"]["message"]


def test_ids_that_are_refused(stack: Stack) -> None:
    told = events(stack, BODY, said=0)
    raw = base64.b64decode(told[3][0])  # the id of the first text

    def refused(changed: bytes, status: int, **fields: Any) -> None:
        headers = {"last-event-id": base64.b64encode(changed).decode()}
        error_of(stack.runner.run(stack.clients[0].post(PATH, json=BODY | fields, headers=headers)), status)

    for place in range(len(raw)):
        refused(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], 400)
    refused(raw[:-3], 400)
    refused(raw, 409, max_tokens=399)
    refused(raw, 400, stream=False)


async def test_whose_stream_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice,bob: sk-bob")
    config = Config.model_validate({"model": "embedded", "ingress": {"api_keys_env": "KEYS"}})
    llm = AsyncLLM(config)
    llm.add_engine(WritingEngine("a", Random(0)))
    async with client_of(build_asgi_app(llm, config, surroundings=Surroundings(secret=SECRET))) as client:

        async def post(key: str, event_id: str = "") -> httpx.Response:
            headers = {"x-api-key": key} | ({"last-event-id": event_id} if event_id else RESUMABLE)
            return await client.post(PATH, json=BODY, headers=headers)

        event_id = (await post("sk-alice")).text.split("\n")[0].removeprefix("id: ")
        assert (await post("sk-alice", event_id)).status_code == 200
        error_of(await post("sk-bob", event_id), 404)
    await llm.stop()


async def test_the_official_client_reads_events_with_ids() -> None:
    config = Config(model="embedded")
    llm = AsyncLLM(config)
    llm.add_engine(WritingEngine("a", Random(0)))
    llm.engines[0].first = 0  # type: ignore[attr-defined]
    ask: Any = {name: value for name, value in BODY.items() if name != "stream"}
    async with (
        served(build_asgi_app(llm, config)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(**ask, extra_headers=RESUMABLE) as answer,
    ):
        assert "".join([piece async for piece in answer.text_stream]) == SAID[0]
    await llm.stop()

"""Streams that are cut after any event and resumed with its id. The engine draws texts that the test wrote."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import Surroundings, build_asgi_app
from tests.ingress.harness import client_of, until
from tests.ingress.refused import error_of
from tests.ingress.writing_engine import WritingEngine

SECRET = b"s" * 32
RESUMABLE = {"x-raylm-resumable": "true"}


class Stack:
    """Two ingresses with an engine each, on a separate event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.random = Random(0)
        self.llms: list[AsyncLLM] = []
        self.engines: list[WritingEngine] = []
        self.clients: list[httpx.AsyncClient] = []
        self.runner.run(self._open())

    async def _open(self) -> None:
        for name in "ab":
            config = Config(model="embedded")
            self.llms.append(AsyncLLM(config))
            self.engines.append(WritingEngine(name, self.random))
            self.engines[-1].parks = True
            self.llms[-1].add_engine(self.engines[-1])
            self.clients.append(
                client_of(build_asgi_app(self.llms[-1], config, surroundings=Surroundings(secret=SECRET)))
            )

    def events(self, path: str, body: dict[str, Any], event_id: str = "") -> list[tuple[str, Any]]:
        """(id, data) of each event of an answer from one of the two ingresses."""
        return self.runner.run(self._events(path, body, event_id))

    async def _events(self, path: str, body: dict[str, Any], event_id: str) -> list[tuple[str, Any]]:
        headers = {"last-event-id": event_id} if event_id else RESUMABLE
        answer = await self.random.choice(self.clients).post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found = []
        for block in answer.text.removesuffix("\n\n").split("\n\n"):
            line, *_, data = block.split("\n")
            assert line.startswith("id: ")
            assert len(line) <= 84
            found.append((line[4:], data.removeprefix("data: ")))
        return found

    def close(self) -> None:
        for llm in self.llms:
            self.runner.run(llm.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.close()


def joined(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The whole answer, as a client joins it from a stream: each choice, with unique values only once."""
    assert [data for _, data in events].count("[DONE]") == 1
    assert events[-1][1] == "[DONE]"
    whole: dict[str, Any] = {"usage": None, "choices": {}}
    for _, data in events[:-1]:
        chunk = orjson.loads(data)
        if chunk.get("usage") and not chunk["choices"]:
            assert whole["usage"] is None
            whole["usage"] = chunk["usage"]
        for piece in chunk["choices"]:
            choice = whole["choices"].setdefault(piece["index"], {})
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if piece.get(name) is not None:
                    assert name not in choice
                    choice[name] = piece[name]
            for name in ("text", "token_ids"):
                if name in piece:
                    choice[name] = choice.get(name, type(piece[name])()) + piece[name]
            for name, column in (piece["logprobs"] or {}).items():
                kept = choice.setdefault("logprobs", {})
                kept[name] = kept.get(name, []) + column if column is not None else kept.get(name)
            merge_delta(choice, piece.get("delta", {}))
    return whole


def merge_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    if "role" in delta:
        assert "role" not in choice
        choice["role"] = delta["role"]
    for name in ("content", "reasoning", "reasoning_content"):
        if name in delta:
            choice[name] = choice.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = choice.setdefault("tool_calls", {})
        if "id" in call:  # the id is random, and must come once
            assert call["index"] not in calls
            calls[call["index"]] = [call["function"]["name"], ""]
        calls[call["index"]][1] += call["function"]["arguments"]


MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USAGE = {"stream_options": {"include_usage": True}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "n": 4, "stop": ["END", "EN\n"], **USAGE}),
    (CHAT, {"messages": MESSAGES, "n": 7, "tools": TOOLS, "logprobs": True, "top_logprobs": 2, **USAGE}),
    (CHAT, {"messages": MESSAGES, "n": 3, "tools": TOOLS, "parallel_tool_calls": False, "stop": "hen?"}),
    (CHAT, {"messages": MESSAGES, "n": 2, "logprobs": True, "return_token_ids": True, "max_tokens": 5}),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}], "echo": True, "n": 2, **USAGE}),
    (TEXT, {"prompt": "Say", "n": 3, "max_tokens": 60, "stop": ["END"], **USAGE}),
    (TEXT, {"prompt": ["one", "two"], "n": 5, "max_tokens": 7, "echo": True, "seed": 3}),
    (TEXT, {"prompt": ["one", "two"], "n": 2, "max_tokens": 90, "logprobs": 2, "stop": ["END", "🙂🙂"], **USAGE}),
    (TEXT, {"prompt": "Say", "n": 2, "max_tokens": 40, "logprobs": 1, "return_token_ids": True, "stop": "EN",
            "include_stop_str_in_output": True, "stream_options": {"continuous_usage_stats": True}}),
    (TEXT, {"prompt": "Say", "n": 2, "max_tokens": 0, "echo": True, **USAGE}),
]  # fmt: skip


CUTS = st.lists(st.floats(0, 1), min_size=1, max_size=3)  # fractions of the remaining events


@given(case=st.sampled_from(BODIES), seed=st.none() | st.integers(0, 7), luck=st.integers(), cuts=CUTS)
@settings(max_examples=60, deadline=None)
def test_a_stream_goes_on_behind_any_event(
    stack: Stack, case: tuple[str, dict[str, Any]], seed: int | None, luck: int, cuts: list[float]
) -> None:
    path, fields = case
    stack.random.seed(luck)
    body = {"model": "embedded", "stream": True} | ({} if seed is None else {"seed": seed}) | fields
    undisturbed = stack.events(path, body)
    told: list[tuple[str, Any]] = []
    going_on = undisturbed
    for cut in cuts:
        told += going_on[: 1 + int(cut * len(going_on))]
        if told[-1][1] == "[DONE]":
            break
        going_on = stack.events(path, body, told[-1][0])
    else:
        told += going_on
    want, got = joined(undisturbed), joined(told)
    for usage in (want["usage"], got["usage"]):
        if usage is not None:
            del usage["prompt_tokens_details"]  # the number of cached prompt tokens may differ
    assert got == want


def test_the_engines_gave_tokens_that_were_parked(stack: Stack) -> None:
    for seed in range(8):
        stack.random.seed(seed)
        body = {"model": "embedded", "stream": True, "messages": MESSAGES, "n": 3, "seed": seed}
        undisturbed = stack.events(CHAT, body)
        given = sum(engine.given for engine in stack.engines)
        again = stack.events(CHAT, body, undisturbed[0][0])
        assert joined(undisturbed[:1] + again)["choices"] == joined(undisturbed)["choices"]
        if sum(engine.given for engine in stack.engines) > given:
            return
    raise AssertionError("nothing was taken over")


def test_every_event_is_a_place_to_go_on_from(stack: Stack) -> None:
    body = {"model": "embedded", "stream": True, "messages": MESSAGES, "n": 2, "seed": 1, "stop": "END", **USAGE}
    undisturbed = stack.events(CHAT, body)
    ids = [event_id for event_id, _ in undisturbed]
    assert len(set(ids)) == len(ids) - 1  # the id before [DONE] is repeated with it
    for place, event_id in enumerate(ids[:-1], 1):
        rest = stack.events(CHAT, body, event_id)
        assert joined(undisturbed[:place] + rest)["choices"] == joined(undisturbed)["choices"]
    assert stack.events(CHAT, body, ids[-1]) == undisturbed[-1:]


def refused(stack: Stack, event_id: str, status: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "embedded", "stream": True, "messages": MESSAGES, "seed": 1} | fields
    answer = stack.runner.run(stack.clients[0].post(CHAT, json=body, headers={"last-event-id": event_id}))
    error: dict[str, Any] = error_of(answer, status)
    assert error["param"] == "Last-Event-ID"
    return error


def test_ids_that_are_refused(stack: Stack) -> None:
    body = {"model": "embedded", "stream": True, "messages": MESSAGES, "seed": 1}
    (event_id, _), *_ = stack.events(CHAT, body)
    raw = base64.b64decode(event_id)
    for place in range(len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        refused(stack, base64.b64encode(changed).decode(), 400)
    for text in ("x", "§", event_id[:-4], event_id[:-1], event_id + "AAAA" * 11, "A" * 5000):
        answer = stack.runner.run(stack.clients[0].post(CHAT, json=body, headers={"last-event-id": text.encode()}))
        error_of(answer, 400)
    refused(stack, event_id, 409, seed=2)
    refused(stack, event_id, 400, stream=False)


async def test_whose_stream_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice,bob: sk-bob")
    config = Config.model_validate({"model": "embedded", "ingress": {"api_keys_env": "KEYS"}})
    llm, body = AsyncLLM(config), {"model": "embedded", "stream": True, "messages": MESSAGES}
    first = WritingEngine("a", Random(0))
    llm.add_engine(first)
    async with client_of(build_asgi_app(llm, config, surroundings=Surroundings(secret=SECRET))) as client:

        async def post(key: str, event_id: str = "") -> httpx.Response:
            headers = {"x-api-key": key} | ({"last-event-id": event_id} if event_id else RESUMABLE)
            return await client.post(CHAT, json=body, headers=headers)

        event_id = (await post("sk-alice")).text.split("\n")[0].removeprefix("id: ")
        assert (await post("sk-alice", event_id)).status_code == 200
        error_of(await post("sk-bob", event_id), 404)
        first.die()
        await until(lambda: not llm.is_ready)
        llm.add_engine(WritingEngine("b", Random(0), "fp_2"))
        error_of(await post("sk-alice", event_id), 409)
        assert (await post("sk-alice")).text.startswith("id: ")
        llm.add_engine(WritingEngine("c", Random(0), "fp_3"))  # different ones promise nothing
        assert (await post("sk-alice")).text.startswith("data: ")
        error_of(await post("sk-alice", event_id), 409)
    await llm.stop()


def test_a_stream_of_too_many_choices_has_no_ids(stack: Stack) -> None:
    for n, begins in ((11, "id: "), (12, "data: ")):
        body = {"model": "embedded", "stream": True, "messages": MESSAGES, "n": n}
        answer = stack.runner.run(stack.clients[0].post(CHAT, json=body, headers=RESUMABLE))
        assert answer.text.startswith(begins)


def test_a_client_that_does_not_ask_gets_one_line_of_data_an_event(stack: Stack) -> None:
    for path, fields in BODIES:
        body = {"model": "embedded", "stream": True} | fields
        for headers in ({}, {"x-raylm-resumable": "false"}):
            answer = stack.runner.run(stack.clients[0].post(path, json=body, headers=headers))
            blocks = answer.text.removesuffix("\n\n").split("\n\n")
            assert [block.count("\n") for block in blocks] == [0] * len(blocks)
            assert all(block.startswith("data: ") for block in blocks)


def test_a_wrong_value_of_the_header_is_refused(stack: Stack) -> None:
    body = {"model": "embedded", "stream": True, "messages": MESSAGES}
    answer = stack.runner.run(stack.clients[0].post(CHAT, json=body, headers={"x-raylm-resumable": "yes"}))
    assert error_of(answer, 400)["param"] == "x-raylm-resumable"


async def test_a_stream_waits_for_an_engine_that_can_go_on_with_it() -> None:
    config, body = Config(model="embedded"), {"model": "embedded", "stream": True, "messages": MESSAGES, "seed": 1}
    llm = AsyncLLM(config, recovery_timeout_s=0.2)
    first = WritingEngine("a", Random(0))
    llm.add_engine(first)
    async with client_of(build_asgi_app(llm, config, surroundings=Surroundings(secret=SECRET))) as client:
        whole = (await client.post(CHAT, json=body, headers=RESUMABLE)).text
        headers = {"last-event-id": whole.split("\n")[0].removeprefix("id: ")}
        first.die()
        await until(lambda: not llm.is_ready)
        error_of(await client.post(CHAT, json=body, headers=headers), 503)
        going_on = asyncio.create_task(client.post(CHAT, json=body, headers=headers))
        await asyncio.sleep(0.05)
        llm.add_engine(WritingEngine("b", Random(0)))
        answer = await going_on
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    await llm.stop()

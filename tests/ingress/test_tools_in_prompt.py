"""``tool_parser: prompt`` with a small checkpoint whose template has no tools: all three APIs, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.embedded_server import EmbeddedServer
from tests.ingress.harness import events, typed_events

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "How is it in Rome?"}]
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 200}
RESPONSE: dict[str, Any] = {"input": ASK, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
MESSAGE: dict[str, Any] = {
    "messages": ASK,
    "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("plain"), max_position_embeddings=4096)
    with (
        EmbeddedServer(model=str(checkpoint), tool_parser="prompt") as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-raylm-ignored-fields" not in answer.headers, "tools must not be ignored"
    return answer


def is_call(name: str, arguments: Any) -> bool:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == "get_weather" and given in ({"city": "Rome"}, {"city": "Oslo"})


def test_chats_call_tools(client: httpx.Client) -> None:
    body = CHAT | {"tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = post(client, "/v1/chat/completions", body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert is_call(**call["function"])
    assert choice["finish_reason"] == "tool_calls"
    chunks = events(post(client, "/v1/chat/completions", body | {"stream": True}).text)[:-1]
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert is_call("get_weather", "".join(piece["function"]["arguments"] for piece in pieces))


def test_responses_call_tools(client: httpx.Client) -> None:
    body = RESPONSE | {"tool_choice": "required", "parallel_tool_calls": False}
    (item,) = post(client, "/v1/responses", body).json()["output"]
    assert item["type"] == "function_call"
    assert is_call(item["name"], item["arguments"])
    found = typed_events(post(client, "/v1/responses", body | {"stream": True}).text)
    (done,) = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert is_call("get_weather", done["arguments"])


def test_messages_call_tools(client: httpx.Client) -> None:
    body = MESSAGE | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = post(client, "/v1/messages", body).json()
    (block,) = answer["content"]
    assert is_call(block["name"], block["input"])
    assert answer["stop_reason"] == "tool_use"
    found = typed_events(post(client, "/v1/messages", body | {"stream": True}).text)
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert is_call("get_weather", "".join(pieces))


def test_an_answer_of_its_own_choice_is_text_or_calls(client: httpx.Client) -> None:
    for seed in range(4):
        body = CHAT | {"seed": seed, "temperature": 1.5, "max_tokens": 30}
        (choice,) = post(client, "/v1/chat/completions", body).json()["choices"]
        assert "<tool_call>" not in (choice["message"]["content"] or "")


def test_the_description_of_tools_is_in_the_prompt_and_counted(client: httpx.Client) -> None:
    bare = post(client, "/v1/messages/count_tokens", {"messages": ASK}).json()["input_tokens"]
    with_tools = {name: MESSAGE[name] for name in ("messages", "tools")}
    told = post(client, "/v1/messages/count_tokens", with_tools).json()["input_tokens"]
    used = post(client, "/v1/messages", MESSAGE | {"max_tokens": 1}).json()["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == told > bare + 100
    tokenized = post(client, "/tokenize", {name: CHAT[name] for name in ("messages", "tools")}).json()
    assert tokenized["count"] == told

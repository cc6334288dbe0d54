"""/v1/messages with a fake AsyncLLM: blocks, events, tools, thinking, token counts, errors; and the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from starlette.applications import Starlette

from raylm.errors import EngineDiedError
from raylm.frontend import read_arguments
from raylm.ingress.anthropic.blocks import SIGNATURE
from tests.ingress.fake_llm import FakeAsyncLLM, think_and_call
from tests.ingress.harness import served, typed_events

MODEL = "org/fake-model"
PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {}}}]


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=BODY | fields)
    assert answer.status_code == 200, answer.text
    anthropic.types.Message.model_validate(answer.json(), strict=True, extra="forbid")
    return answer.json()  # type: ignore[no-any-return]


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json=BODY | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    return typed_events(answer.text)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body.keys() == {"type", "error"}
    assert body["error"].keys() == {"type", "message"}
    return body["error"]  # type: ignore[no-any-return]


async def test_a_whole_message(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    message = await create(client, system=system, temperature=0.5, top_k=3, metadata={"user_id": "u"})
    assert message["content"] == [{"type": "text", "text": "Hello wörld", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 13
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(llm.calls[0].prompt)
    assert [(m["role"], m["content"]) for m in llm.rendered[0].messages] == [("system", "Be kind."), ("user", "Hi")]
    assert llm.rendered[0].template_kwargs == {"enable_thinking": False}
    params = llm.calls[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 200)
    assert (await create(client, max_tokens=4))["stop_reason"] == "max_tokens"


async def test_events_come_in_order(client: httpx.AsyncClient) -> None:
    events = await stream(client)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == "Hello wörld"
    assert events[-2]["delta"] == {
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert events[-2]["usage"]["output_tokens"] == 13
    begun = events[0]["message"]["usage"]
    assert begun["input_tokens"] + begun["cache_read_input_tokens"] > 0
    assert (begun["output_tokens"], begun["output_tokens_details"]) == (0, {"thinking_tokens": 0})


# Required fields in Anthropic's specification: of a message, of its usage, and of a message_delta's usage.
REQUIRED = {
    "id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container",
}  # fmt: skip
REQUIRED_OF_DELTA_USAGE = {
    "cache_creation_input_tokens", "cache_read_input_tokens", "input_tokens", "output_tokens", "output_tokens_details",
    "server_tool_use",
}  # fmt: skip
REQUIRED_OF_USAGE = REQUIRED_OF_DELTA_USAGE | {"cache_creation", "inference_geo", "service_tier"}


async def test_messages_have_all_required_fields(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    think_and_call(llm)
    message = await create(client, tools=TOOLS, thinking={"type": "adaptive"})
    events = await stream(client, tools=TOOLS, thinking={"type": "adaptive"})
    for found in (message, events[0]["message"]):
        assert found.keys() == REQUIRED
        assert found["usage"].keys() == REQUIRED_OF_USAGE
    assert events[-2]["delta"].keys() == {"container", "stop_details", "stop_reason", "stop_sequence"}
    assert events[-2]["usage"].keys() == REQUIRED_OF_DELTA_USAGE
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for blocks in (message["content"], begun):
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert blocks[1]["citations"] is None
        assert [block["caller"] for block in blocks[2:]] == [{"type": "direct"}] * 2
    again = [{"role": "assistant", "content": message["content"][1:2]}, {"role": "user", "content": "And?"}]
    await create(client, messages=[{"role": "user", "content": "Hi"}, *again])


@pytest.mark.parametrize("step", [1, 7, 500])
async def test_thoughts_text_and_calls_are_blocks(client: httpx.AsyncClient, llm: FakeAsyncLLM, step: int) -> None:
    think_and_call(llm)
    llm.step = step
    message = await create(client, tools=TOOLS, thinking={"type": "adaptive"})
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("Hm.", "I ask.")
    assert [block["input"] for block in message["content"][2:]] == [{"a": 0}, {"a": 1}]
    assert message["stop_reason"] == "tool_use"
    events = await stream(client, tools=TOOLS, thinking={"type": "adaptive"})
    assert llm.rendered[-1].template_kwargs == {"enable_thinking": True}
    edges = [(e["type"][14:], e["index"]) for e in events if e["type"] in ("content_block_start", "content_block_stop")]
    assert edges == [(edge, index) for index in range(4) for edge in ("start", "stop")]
    pieces, signatures = ["", "", "", ""], list[tuple[int, str]]()
    for event in events:
        if event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            if kind == "signature_delta":
                signatures.append((event["index"], piece))
            else:
                pieces[event["index"]] += piece
    assert pieces[:2] == ["Hm.", "I ask."]
    assert signatures == [(0, SIGNATURE)]
    assert [json.loads(piece) for piece in pieces[2:]] == [{"a": 0}, {"a": 1}]


async def test_a_call_that_a_limit_cut_has_what_is_there_of_its_input(
    client: httpx.AsyncClient, llm: FakeAsyncLLM
) -> None:
    """The same as in its stream, and as in the text of chat completions and responses."""
    think_and_call(llm)
    llm.reply = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "days": [1, 22]}}\n</tool_call>'
    inputs: list[Any] = []
    for limit in range(30, len(llm.reply.encode()) + 1):
        content = (await create(client, tools=TOOLS, max_tokens=limit))["content"]
        inputs += [block["input"] for block in content if block["type"] == "tool_use"]
        streamed = [event for event in await stream(client, tools=TOOLS, max_tokens=limit) if "delta" in event]
        text = "".join(event["delta"].get("partial_json", "") for event in streamed)
        function = {"type": "function", "function": {"name": "f", "parameters": {}}}
        chat = BODY | {"max_tokens": limit, "tools": [function]}
        message = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
        assert text == "".join(call["function"]["arguments"] for call in message["tool_calls"] or ())
        assert inputs[-1:] == ([read_arguments(text)] if content else [])
    told = [found for at, found in enumerate(inputs) if found not in inputs[:at]]
    cities = [{"city": "Köln"[:end]} for end in range(5)]
    days: list[list[int]] = [[], [1], [1, 2], [1, 22]]
    assert [found for found in told if found != {"city": "K�"}] == [
        {},
        *cities,
        *({**cities[-1], "days": d} for d in days),
    ]


async def test_blocks_become_messages(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "text", "text": "A"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "R"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "lost", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    messages.append({"role": "system", "content": [{"type": "text", "text": "Be brief."}]})
    await create(client, messages=messages, tools=TOOLS)
    user, turn, *rest = llm.rendered[0].messages
    assert user["content"] == "U"
    assert (turn["content"], turn["reasoning_content"]) == ("A", "T")
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    said = [(message["role"], message["content"]) for message in rest]
    assert said == [("tool", "R"), ("tool", "Error: lost"), ("user", "Go on."), ("system", "Be brief.")]


async def test_a_begun_answer_goes_on(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    await create(client, messages=[*BODY["messages"], {"role": "assistant", "content": "Well,"}])
    assert llm.rendered[0].continue_final_message
    assert not llm.rendered[0].add_generation_prompt


async def test_a_call_at_the_end_lacks_its_result(client: httpx.AsyncClient) -> None:
    """count_tokens accepts it, because an agent may count before it runs the tool."""
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    messages = [*BODY["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Well,"}, call]}]
    refused = await client.post(PATH, json=BODY | {"messages": messages, "tools": TOOLS})
    assert "messages[1].content" in error_of(refused)["message"]
    counted = await client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": messages, "tools": TOOLS})
    assert counted.json()["input_tokens"] > 0
    messages[1]["content"] = []
    refused = await client.post(PATH, json=BODY | {"messages": messages})
    assert "continue_final_message" not in error_of(refused)["message"]


async def test_counted_tokens_are_those_of_the_message(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    body = {"model": MODEL, "messages": BODY["messages"], "system": "S", "tools": TOOLS}
    counted = (await client.post(f"{PATH}/count_tokens", json=body)).json()
    usage = (await create(client, system="S", tools=TOOLS))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    error_of(await client.post(f"{PATH}/count_tokens", json=BODY))  # count_tokens has no field max_tokens


async def test_edits_that_remove_nothing_change_nothing(client: httpx.AsyncClient) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    answer = await client.post(f"{PATH}?beta=true", json=BODY | {"context_management": {"edits": edits}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == (await create(client))["content"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    ({"system": 3}, "system"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"metadata": {"name": "x"}}, "metadata.name"),
    ({"container": "c"}, "container"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
    ({"context_management": {"zzz": 1}}, "context_management.zzz"),
    ({"n": 2}, "n"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
]


@pytest.mark.parametrize(("fields", "named"), BAD)
async def test_refusals(client: httpx.AsyncClient, fields: dict[str, Any], named: str) -> None:
    error = error_of(await client.post(PATH, json=BODY | fields))
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


async def test_errors_of_the_edge_have_anthropics_envelope(client: httpx.AsyncClient, app: Starlette) -> None:
    missing = await client.post(PATH, json=BODY | {"model": "claude"})
    assert error_of(missing, 404)["type"] == "not_found_error"
    assert error_of(await client.get(PATH), 405)["type"] == "invalid_request_error"
    assert error_of(await client.post(f"{PATH}/batches", json={}), 404)["type"] == "not_found_error"
    assert error_of(await client.post(PATH, content=b"{"), 415)["type"] == "invalid_request_error"
    other = await client.post("/v1/messages_of_mine", json={})
    assert "code" in other.json()["error"]
    await app.state.requests.drain(0)
    assert error_of(await client.post(PATH, json=BODY), 503)["type"] == "overloaded_error"


async def test_what_fails_later_is_told(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.fail_after, llm.failure = 3, EngineDiedError("The engine was lost.")
    events = await stream(client)
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "The engine was lost."}}
    assert error_of(await client.post(PATH, json=BODY), 503)["message"] == "The engine was lost."


@pytest.fixture
async def api(app: Starlette) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with served(app) as url, anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as found:
        yield found


async def test_the_official_client(api: anthropic.AsyncAnthropic, llm: FakeAsyncLLM) -> None:
    ask: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
    message = await api.messages.create(**ask)
    assert message.content[0].text == "Hello wörld"  # type: ignore[union-attr]
    async with api.messages.stream(**ask) as events:
        text = "".join([piece async for piece in events.text_stream])
        final = await events.get_final_message()
    assert text == "Hello wörld"
    assert final.stop_reason == "end_turn"
    assert (await api.messages.count_tokens(model=MODEL, messages=ask["messages"])).input_tokens > 0
    think_and_call(llm)
    async with api.messages.stream(**ask, tools=TOOLS, thinking={"type": "adaptive"}) as events:
        final = await events.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"a": 0}, {"a": 1}]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await api.messages.create(**ask, extra_body={"temperature": 3})
    with pytest.raises(anthropic.NotFoundError):
        await api.messages.create(**ask | {"model": "claude"})


async def test_errors_have_the_same_form_below_a_prefix(app: Starlette) -> None:
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/llm") as mounted:
        assert error_of(await mounted.post(PATH, json=BODY | {"model": "other"}), 404)["type"] == "not_found_error"
        assert error_of(await mounted.get(PATH), 405)["type"] == "invalid_request_error"
        assert (await mounted.post(PATH, json=BODY)).status_code == 200

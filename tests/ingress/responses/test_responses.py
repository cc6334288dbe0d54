"""/v1/responses with a fake AsyncLLM: items, ordered events, the store, chains, the background, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.errors import EngineDiedError, InvalidRequestError
from raylm.ingress import build_asgi_app
from raylm.ingress.responses import job
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.store import ResponseStore
from tests.ingress.fake_llm import FakeAsyncLLM, think_and_call
from tests.ingress.harness import client_of, served, typed_events, until
from tests.ingress.openai.test_openai_schema import SPEC, check
from tests.ingress.refused import error_of

MODEL = "org/fake-model"
PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi"}


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=BODY | fields)
    assert answer.status_code == 200, answer.text
    check(answer.json(), "Response")
    return answer.json()  # type: ignore[no-any-return]


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json=BODY | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    found = typed_events(answer.text)
    for event in found:
        check(event, "ResponseStreamEvent")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_whole_response(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    response = await create(client, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="u", top_k=3)
    assert text_of(response) == "Hello wörld"
    assert (response["status"], response["temperature"], response["metadata"]) == ("completed", 0.5, {"a": "b"})
    assert response["usage"]["output_tokens"] == 13
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 13
    assert [(m["role"], m["content"]) for m in llm.rendered[-1].messages] == [("system", "Be kind."), ("user", "Hi")]
    assert llm.calls[-1].params.top_k == 3


async def test_responses_in_events_have_usage_and_tools_a_description(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "name": "f"}]
    shown = [event["response"] for event in await stream(client, tools=tools) if "response" in event]
    assert [response["usage"]["output_tokens"] for response in shown] == [0, 0, 13]
    assert shown[-1]["tools"] == [tools[0] | {"description": None, "parameters": None, "strict": None}]


async def test_a_response_that_was_cut_short(client: httpx.AsyncClient) -> None:
    response = await create(client, max_output_tokens=4)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert (await stream(client, max_output_tokens=4))[-1]["type"] == "response.incomplete"


async def test_events_come_in_order(client: httpx.AsyncClient) -> None:
    events = await stream(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == events[-4]["text"] == text_of(events[-1]["response"]) == "Hello wörld"
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


async def test_logprobs_are_those_of_the_text(client: httpx.AsyncClient) -> None:
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = await create(client, **fields)
        (part,) = response["output"][0]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]) == "Hello wörld".encode()
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {fields.get("top_logprobs", 0)}
        events = await stream(client, **fields)
        told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert sum(map(len, told)) == 12
    assert all(not event.get("logprobs") for event in await stream(client))


async def test_items_become_messages(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}], "type": "message"},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "R"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "S"}]},
    ]
    await create(client, input=items)
    messages = llm.rendered[-1].messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("A", "T")
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [m["content"] for m in messages[3:]] == ["R", "S"]


async def test_stored_ones_are_fetched_listed_and_deleted(client: httpx.AsyncClient) -> None:
    response = await create(client, input=[{"role": "user", "content": text} for text in "abc"])
    path = f"{PATH}/{response['id']}"
    assert (await client.get(path)).json() == response
    listed = (await client.get(f"{path}/input_items")).json()
    check(listed, "ResponseItemList")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b", "a"]
    page = (await client.get(f"{path}/input_items?order=asc&limit=1&after={listed['data'][2]['id']}")).json()
    assert ([item["content"][0]["text"] for item in page["data"]], page["has_more"]) == (["b"], True)
    assert (await client.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, place in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        assert error_of(await client.request(method, place), 404)["code"] == "not_found"
    unstored = await create(client, store=False)
    error_of(await client.get(f"{PATH}/{unstored['id']}"), 404)


async def test_a_chain_of_responses(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    first = await create(client, input="one", instructions="not inherited")
    done = (await stream(client, input="two", previous_response_id=first["id"]))[-1]["response"]
    third = await create(client, input="three", previous_response_id=done["id"])
    assert third["previous_response_id"] == done["id"]
    messages = [(message["role"], message["content"]) for message in llm.rendered[-1].messages]
    said = ("assistant", "Hello wörld")
    assert messages == [("user", "one"), said, ("user", "two"), said, ("user", "three")]
    missing = await client.post(PATH, json=BODY | {"previous_response_id": "resp_x"})
    assert error_of(missing, 404)["param"] == "previous_response_id"


async def test_truncation_drops_the_oldest_turns(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.max_model_len = 60
    items = [{"role": "user", "content": f"{number} " + "x" * 8} for number in range(9)]
    error = error_of(await client.post(PATH, json=BODY | {"input": items}))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    await create(client, input=items, instructions="I", truncation="auto", max_output_tokens=4)
    kept = [message["content"][0] for message in llm.rendered[-1].messages]
    assert kept[0] == "I"
    assert kept[-1] == "8"
    assert 2 < len(kept) < 9


async def test_in_the_background(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    response = await create(client, background=True)
    assert response["status"] == "queued"
    await until(lambda: llm.calls[-1:] and llm.calls[-1].ended == "finished")
    path = f"{PATH}/{response['id']}"
    while (done := (await client.get(path)).json())["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    check(done, "Response")
    assert (done["status"], text_of(done)) == ("completed", "Hello wörld")
    assert (await client.post(f"{path}/cancel")).json() == done
    foreground = await create(client)
    assert error_of(await client.post(f"{PATH}/{foreground['id']}/cancel"))["param"] == "response_id"


@pytest.mark.parametrize("by", ["cancel", "delete"])
async def test_the_background_is_left(client: httpx.AsyncClient, llm: FakeAsyncLLM, by: str) -> None:
    llm.gate = asyncio.Event()
    response = await create(client, background=True)
    path = f"{PATH}/{response['id']}"
    await until(lambda: bool(llm.calls))
    while (await client.get(path)).json()["status"] != "in_progress":  # noqa: ASYNC110 - a server has no event here
        await asyncio.sleep(0.005)
    if by == "cancel":
        cancelled = (await client.post(f"{path}/cancel")).json()
        check(cancelled, "Response")
        assert cancelled["status"] == "cancelled"
    else:
        await client.delete(path)
    await until(lambda: llm.calls[0].ended == "aborted")
    assert (await client.get(path)).status_code == (200 if by == "cancel" else 404)


async def test_what_fails_later_is_told(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.fail_after, llm.failure = 3, EngineDiedError("The engine was lost.")
    events = await stream(client)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "The engine was lost."}
    assert (await create(client))["status"] == "failed"
    llm.fail_after = 0
    for streamed in (False, True):
        refused = await client.post(PATH, json=BODY | {"stream": streamed})
        assert error_of(refused, 503)["code"] == "engine_died"
    response = await create(client, background=True)
    await until(lambda: len(llm.calls) == 5 and llm.calls[4].ended == "failed")
    while (await client.get(f"{PATH}/{response['id']}")).json()["status"] != "failed":  # noqa: ASYNC110
        await asyncio.sleep(0.005)


TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize("step", [1, 7, 500])
async def test_thoughts_text_and_calls_are_items(client: httpx.AsyncClient, llm: FakeAsyncLLM, step: int) -> None:
    think_and_call(llm)
    llm.step = step
    response = await create(client, tools=TOOLS)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [part["text"] for item in response["output"][:2] for part in item["content"]] == ["Hm.", "I ask."]
    assert [item["arguments"] for item in response["output"][2:]] == ['{"a": 0}', '{"a": 1}']
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = await stream(client, tools=TOOLS)
    pieces: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] = pieces.get(event["output_index"], "") + event["delta"]
    assert list(pieces.values()) == ["Hm.", "I ask.", '{"a": 0}', '{"a": 1}']
    edges = [(event["output_index"], event["type"][-5:]) for event in events if "output_item" in event["type"]]
    assert edges == [(index, edge) for index in range(4) for edge in ("added", ".done")]


async def test_a_round_trip_of_a_call(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    think_and_call(llm)
    first = await create(client, tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "R"} for item in first["output"][2:]
    ]
    llm.reply = "Done."
    second = await create(client, tools=TOOLS, input=results, previous_response_id=first["id"])
    assert text_of(second) == "Done."
    user, turn, *tools = llm.rendered[-1].messages
    assert user["content"] == "Hi"
    assert (turn["content"], turn["reasoning_content"]) == ("I ask.", "Hm.")
    assert [call["id"] for call in turn["tool_calls"]] == [tool["tool_call_id"] for tool in tools]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"min_tokens": 9, "max_output_tokens": 4}, "min_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"service_tier": "x"}, "service_tier"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"background": True, "store": False}, "background"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"tone": "kind"}}, "text.tone"),
    ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"conversation": {"id": "c", "zzz": 1}}, "conversation.zzz"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"n": 2}, "n"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"truncation": "middle"}, "truncation"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_refusals(client: httpx.AsyncClient, llm: FakeAsyncLLM, fields: dict[str, Any], param: str) -> None:
    if fields.get("max_output_tokens") == 10**6:
        llm.max_model_len = 3  # the fake checks only the prompt
    assert error_of(await client.post(PATH, json=BODY | fields))["param"] == param


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3", "limit=0"])
async def test_refused_queries(client: httpx.AsyncClient, query: str) -> None:
    response = await create(client)
    place = "/input_items" if "limit" in query else ""
    error = error_of(await client.get(f"{PATH}/{response['id']}{place}?{query}"))
    assert error["param"] == query.split("=")[0]


async def test_responses_are_their_keys_own(llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice,bob: sk-bob")
    app = build_asgi_app(llm, Config.model_validate({"ingress": {"api_keys_env": "KEYS"}}))  # type: ignore[arg-type]
    async with client_of(app) as alice, client_of(app) as bob:
        alice.headers["x-api-key"], bob.headers["x-api-key"] = "sk-alice", "sk-bob"
        first = await create(alice)
        place = f"{PATH}/{first['id']}"
        error_of(await bob.get(place), 404)
        error_of(await bob.get(f"{place}/input_items"), 404)
        error_of(await bob.delete(place), 404)
        error = error_of(await bob.post(PATH, json=BODY | {"previous_response_id": first["id"]}), 404)
        assert error["param"] == "previous_response_id"
        assert (await create(alice, previous_response_id=first["id"]))["status"] == "completed"
        llm.gate = asyncio.Event()
        background = await create(alice, background=True)
        error_of(await bob.post(f"{PATH}/{background['id']}/cancel"), 404)
        assert (await alice.post(f"{PATH}/{background['id']}/cancel")).json()["status"] == "cancelled"
        assert (await alice.delete(place)).json()["deleted"]


class Handle:
    """A DeploymentHandle to an object in this process."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


async def test_a_stored_response_has_the_time_of_completion_of_the_answer(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "time", SimpleNamespace(time=count(1000).__next__))
    first = await create(client)
    assert (await client.get(f"{PATH}/{first['id']}")).json() == first


async def test_replicas_share_what_is_stored(llm: FakeAsyncLLM) -> None:
    store = Handle(ResponseStore())
    apps = [build_asgi_app(llm, Config(), {"response_store": store}) for _ in range(2)]  # type: ignore[arg-type]
    async with client_of(apps[0]) as one, client_of(apps[1]) as other:
        first = await create(one)
        assert (await other.get(f"{PATH}/{first['id']}")).json() == first
        assert (await create(other, previous_response_id=first["id"]))["status"] == "completed"
        llm.gate = asyncio.Event()
        background = await create(one, background=True)
        await until(lambda: len(llm.calls) == 3)
        assert (await other.post(f"{PATH}/{background['id']}/cancel")).json()["status"] == "cancelled"
        await until(lambda: llm.calls[2].ended == "aborted")
        assert (await other.delete(f"{PATH}/{first['id']}")).json()["deleted"]
        error_of(await one.get(f"{PATH}/{first['id']}"), 404)


@pytest.fixture
async def api(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


async def test_the_official_client(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(model=MODEL, input="Hi")
    assert response.output_text == "Hello wörld"
    async with api.responses.stream(model=MODEL, input="Hi", previous_response_id=response.id) as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_response()
    assert final.output_text == "Hello wörld"
    assert kinds[0] == "response.created"
    assert (await api.responses.retrieve(final.id)).id == final.id
    listed = await api.responses.input_items.list(final.id)
    assert listed.data[0].type == "message"
    background = await api.responses.create(model=MODEL, input="Hi", background=True)
    assert (await api.responses.cancel(background.id)).id == background.id
    await api.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        await api.responses.retrieve(final.id)


def test_every_field_of_openai_is_decided() -> None:
    decided = ResponsesRequest.model_fields.keys() | ResponsesRequest.unserved | ResponsesRequest.served_by.keys()
    assert set(SPEC["request_fields"]["CreateResponse"]) <= decided
    assert not ResponsesRequest.model_fields.keys() & (ResponsesRequest.unserved | ResponsesRequest.served_by.keys())


async def test_truncation_keeps_the_turns_of_a_template_that_demands_them(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = llm.render_chat

    async def demanding(request: Any) -> list[int]:
        roles = [message["role"] for message in request.messages if message["role"] != "system"]
        if any(role != ("user", "assistant")[place % 2] for place, role in enumerate(roles)):
            raise InvalidRequestError("Conversation roles must alternate.", param="messages")
        return await render(request)

    monkeypatch.setattr(llm, "render_chat", demanding)
    llm.max_model_len = 100
    for turns in range(1, 9):
        items = [{"role": ("user", "assistant")[place % 2], "content": "x" * 12} for place in range(2 * turns + 1)]
        await create(client, input=items, instructions="I", truncation="auto", max_output_tokens=4)
        kept = [message["role"] for message in llm.rendered[-1].messages]
        assert kept[:2] == ["system", "user"]
        assert len(kept) == min(2 * turns + 2, 4)


async def test_truncation_cuts_within_the_last_turn_if_it_must(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.max_model_len = 60
    items: list[dict[str, Any]] = [{"role": "user", "content": "x" * 60}]
    items += [{"role": "assistant", "content": "y" * 20} for _ in range(3)]
    await create(client, input=items, truncation="auto", max_output_tokens=4)
    assert [message["role"] for message in llm.rendered[-1].messages] == ["assistant"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_failed_response_shows_only_items_that_were_told(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, background: bool
) -> None:
    think_and_call(llm)
    llm.fail_after, llm.failure = 1, EngineDiedError("lost")
    *_, failed = await stream(client, background=background)
    assert failed["type"] == "response.failed"
    assert failed["response"]["output"] == []


async def test_a_response_outlives_the_one_before_it_that_was_deleted_meanwhile(
    client: httpx.AsyncClient, llm: FakeAsyncLLM
) -> None:
    first = await create(client, input="one")
    llm.gate = asyncio.Event()
    asking = asyncio.create_task(create(client, input="two", previous_response_id=first["id"]))
    await until(lambda: len(llm.calls) == 2)
    await client.delete(f"{PATH}/{first['id']}")
    llm.gate.set()
    second = await asking
    assert second["store"]
    await create(client, input="three", previous_response_id=second["id"])
    said = ("assistant", "Hello wörld")
    messages = [(message["role"], message["content"]) for message in llm.rendered[-1].messages]
    assert messages == [("user", "one"), said, ("user", "two"), said, ("user", "three")]


async def test_a_response_that_has_not_ended_cannot_be_continued(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.gate = asyncio.Event()
    running = await create(client, background=True)
    await until(lambda: bool(llm.calls))
    refused = await client.post(PATH, json=BODY | {"previous_response_id": running["id"]})
    assert error_of(refused)["param"] == "previous_response_id"
    cancelled = (await client.post(f"{PATH}/{running['id']}/cancel")).json()
    check(cancelled, "Response")
    assert cancelled["output"] == []
    llm.gate.set()
    await create(client, input="two", previous_response_id=running["id"])
    assert [message["content"] for message in llm.rendered[-1].messages] == ["Hi", "two"]

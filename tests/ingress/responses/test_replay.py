"""Items of earlier responses that a client sends back: encrypted reasoning, and references to stored items."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.ingress import Surroundings, build_asgi_app
from raylm.ingress.responses.sealing import Seal
from tests.ingress.fake_llm import FakeAsyncLLM, think_and_call
from tests.ingress.harness import client_of, served
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of
from tests.ingress.responses.test_responses import BODY, MODEL, PATH, create, stream

SEALED = {"include": ["reasoning.encrypted_content"]}
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


async def test_sealed_reasoning_is_read_back(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    think_and_call(llm)
    plain = await create(client, tools=TOOLS)
    assert "encrypted_content" not in plain["output"][0]
    response = await create(client, tools=TOOLS, store=False, **SEALED)
    reasoning, *rest = response["output"]
    assert reasoning["content"] == plain["output"][0]["content"]
    assert "Hm." not in reasoning["encrypted_content"]
    kept = {name: reasoning[name] for name in ("id", "type", "summary", "encrypted_content")}
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in rest
        if item["type"] == "function_call"
    ]
    await create(client, tools=TOOLS, input=[{"role": "user", "content": "Hi"}, kept, *rest, *results], store=False)
    _, turn, *_ = llm.rendered[-1].messages
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "I ask.")
    events = await stream(client, tools=TOOLS, **SEALED)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done[0]["encrypted_content"]
    assert events[-1]["response"]["output"] == done


async def test_what_was_not_sealed_here_is_refused_unless_its_content_is_there(client: httpx.AsyncClient) -> None:
    for sealed in ("x", "", "AAAA" * 30, Seal(b"another").close("Hm.", "")):
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        answer = await client.post(PATH, json=BODY | {"input": [{"role": "user", "content": "Hi"}, item]})
        if sealed:
            assert error_of(answer)["param"] == "input[1].encrypted_content"
        else:
            assert answer.status_code == 200, answer.text
        item["content"] = [{"type": "reasoning_text", "text": "Hm."}]
        await create(client, input=[item, {"role": "user", "content": "Hi"}])


def test_a_seal_is_one_secrets_and_one_owners() -> None:
    seal, sealed = Seal(b"secret"), Seal(b"secret").close("Hm.", "alice")
    assert seal.open(sealed, "alice") == "Hm."
    assert seal.open(sealed, "bob") is None
    assert Seal(b"other").open(sealed, "alice") is None
    assert sealed != seal.close("Hm.", "alice")
    for place in range(0, len(sealed), 7):
        changed = sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
        assert seal.open(changed, "alice") is None


async def test_references_are_resolved(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    think_and_call(llm)
    first = await create(client, input=[{"role": "user", "content": "One"}], tools=TOOLS)
    asked = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
    references = [{"type": "item_reference", "id": item["id"]} for item in (*asked, *first["output"])]
    references[-1].pop("type")  # the type may be omitted
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    second = await create(client, input=[*references, *results], tools=TOOLS)
    by_reference = llm.rendered[-1].messages
    await create(client, input=[{"role": "user", "content": "One"}, *first["output"], *results], tools=TOOLS)
    assert by_reference == llm.rendered[-1].messages
    assert by_reference[1]["reasoning_content"] == "Hm."
    listed = (await client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()
    check(listed, "ResponseItemList")
    assert [item["id"] for item in listed["data"][: len(references)]] == [item["id"] for item in references]


async def test_references_to_nothing_are_a_clear_error(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    stored, unstored = await create(client), await create(client, store=False)
    item_id = stored["output"][0]["id"]
    for wrong in ("msg_1", f"{item_id}9", unstored["output"][0]["id"], f"msg_{'0' * 32}o0"):
        items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": wrong}]
        error = error_of(await client.post(PATH, json=BODY | {"input": items}), 404)
        assert error["param"] == "input[1].id"
        assert wrong in error["message"]
    assert (await client.delete(f"{PATH}/{stored['id']}")).status_code == 200
    reference = {"type": "item_reference", "id": item_id}
    error_of(await client.post(PATH, json=BODY | {"input": [reference]}), 404)


async def test_references_and_seals_are_their_keys_own(llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice,bob: sk-bob")
    config = Config.model_validate({"ingress": {"api_keys_env": "KEYS"}})
    app = build_asgi_app(llm, config, surroundings=Surroundings(secret=b"s" * 32))  # type: ignore[arg-type]
    think_and_call(llm)
    async with client_of(app) as alice, client_of(app) as bob:
        alice.headers["x-api-key"], bob.headers["x-api-key"] = "sk-alice", "sk-bob"
        item = (await create(alice, **SEALED))["output"][0]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
        for given in ({"type": "item_reference", "id": item["id"]}, sealed):
            body = BODY | {"input": [{"role": "user", "content": "Hi"}, given]}
            assert (await alice.post(PATH, json=body)).status_code == 200
            assert (await bob.post(PATH, json=body)).status_code in (400, 404)


async def test_the_official_client_reads_sealed_reasoning(app: Starlette, llm: FakeAsyncLLM) -> None:
    think_and_call(llm)
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client:
        first = await client.responses.create(model=MODEL, input="Hi", include=["reasoning.encrypted_content"])
        assert first.output[0].type == "reasoning"
        assert first.output[0].encrypted_content
        again: Any = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
        assert (await client.responses.create(model=MODEL, input=again)).output_text


async def test_a_response_has_every_field_of_openais(client: httpx.AsyncClient) -> None:
    response = await create(client, presence_penalty=0.5, prompt_cache_key="k", max_tool_calls=3)
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0)
    assert (response["prompt_cache_key"], response["max_tool_calls"]) == ("k", 3)
    assert response["safety_identifier"] is None


async def test_an_unknown_previous_response_is_named(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(PATH, json=BODY | {"previous_response_id": "resp_gone"}), 404)
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert "'resp_gone'" in error["message"]

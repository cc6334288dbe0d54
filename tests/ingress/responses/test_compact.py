"""/v1/responses/compact: a summary as one item, which replaces the conversation in later requests."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.errors import EngineDiedError
from raylm.ingress import build_asgi_app
from raylm.ingress.responses.input import SUMMARIZE
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import client_of, served
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of
from tests.ingress.responses.test_responses import MODEL, PATH, create

COMPACT = f"{PATH}/compact"
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "We launch on Tuesday."}, {"role": "assistant", "content": "Understood."},
]  # fmt: skip
ASK = {"role": "user", "content": "When do we launch?"}


async def compact(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(COMPACT, json={"model": MODEL, "prompt_cache_key": "k"} | fields)
    assert answer.status_code == 200, answer.text
    check(answer.json(), "CompactResource")
    return answer.json()  # type: ignore[no-any-return]


def rendered_messages(llm: FakeAsyncLLM) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in llm.rendered[-1].messages]


async def test_a_conversation_goes_on_from_its_summary(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "Launch: Tuesday."
    compacted = await compact(client, input=TALK, instructions="Be brief.")
    first = [("system", "Be brief."), ("user", "We launch on Tuesday."), ("assistant", "Understood.")]
    assert rendered_messages(llm) == [*first, ("user", SUMMARIZE)]
    (item,) = compacted["output"]
    assert item["type"] == "compaction"
    assert "Tuesday" not in item["encrypted_content"]
    assert compacted["usage"]["output_tokens"] == len("Launch: Tuesday.") + 1
    response = await create(client, input=[item, ASK])
    summary = [("user", SUMMARIZE), ("assistant", "Launch: Tuesday."), ("user", ASK["content"])]
    assert rendered_messages(llm) == summary
    listed = (await client.get(f"{PATH}/{response['id']}/input_items?order=asc")).json()
    check(listed, "ResponseItemList")
    assert [entry["type"] for entry in listed["data"]] == ["compaction", "message"]
    await create(client, input="And then?", previous_response_id=response["id"])
    assert rendered_messages(llm)[:3] == summary


async def test_a_stored_conversation_is_compacted(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    stored = await create(client, input=TALK)
    compacted = await compact(client, previous_response_id=stored["id"])
    assert len(rendered_messages(llm)) == 4
    assert (await client.get(f"{PATH}/{compacted['id']}")).status_code == 404


async def test_refusals(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    for fields, param in (
        ({}, "input"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "model": "other"}, "model"),
    ):
        answer = await client.post(COMPACT, json={"model": MODEL} | fields)
        assert answer.json()["error"]["param"] == param
    item = {"type": "compaction", "encrypted_content": "made up"}
    error = error_of(await client.post(PATH, json={"model": MODEL, "input": [item]}))
    assert error["param"] == "input[0].encrypted_content"


async def test_a_summary_is_its_keys_own(llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice,bob: sk-bob")
    app = build_asgi_app(llm, Config.model_validate({"ingress": {"api_keys_env": "KEYS"}}))  # type: ignore[arg-type]
    async with client_of(app) as alice, client_of(app) as bob:
        alice.headers["x-api-key"], bob.headers["x-api-key"] = "sk-alice", "sk-bob"
        body = {"model": MODEL, "input": [*(await compact(alice, input=TALK))["output"], ASK]}
        assert (await alice.post(PATH, json=body)).status_code == 200
        assert error_of(await bob.post(PATH, json=body))["param"] == "input[0].encrypted_content"


async def test_a_summary_that_fails_is_an_error(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.failure = EngineDiedError("The engine is gone.")
    llm.fail_after = 2
    answer = await client.post(COMPACT, json={"model": MODEL, "input": TALK})
    assert answer.status_code == 503, answer.text


async def test_the_official_client(app: Starlette) -> None:
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        compacted = await api.responses.compact(model=MODEL, input="Hi")
        assert compacted.output[0].type == "compaction"
        again: Any = [item.model_dump(exclude_none=True) for item in compacted.output]
        assert (await api.responses.create(model=MODEL, input=[*again, ASK])).output_text

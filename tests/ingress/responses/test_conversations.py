"""Conversations: stored items, listed, extended by responses, and visible only to their owner."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import orjson
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.ingress import Surroundings, build_asgi_app
from raylm.ingress.responses.conversation_store import Conversation, ConversationTurn
from raylm.ingress.responses.store import ResponseStore, ToldEvents
from tests.conformance.specification import violations
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import client_of, typed_events
from tests.ingress.responses.conftest import Place
from tests.ingress.responses.test_store import Clock, record

MODEL = "org/fake-model"
HI = {"role": "user", "content": "Hi"}


@pytest.fixture
def app(llm: FakeAsyncLLM, place: Place) -> Starlette:
    config = Config.model_validate({"ingress": {"store": place.knob}})
    return build_asgi_app(llm, config, surroundings=Surroundings(application=place.application))  # type: ignore[arg-type]


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = await client.post(path, json=fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def get(client: httpx.AsyncClient, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
    answer = await client.get(path, params=query)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


def rendered_messages(llm: FakeAsyncLLM) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in llm.rendered[-1].messages]


async def test_the_life_of_a_conversation(client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/conversations", items=[HI], metadata={"topic": "greetings"})
    assert violations(made, "ConversationResource") == []
    path = f"/v1/conversations/{made['id']}"
    assert await get(client, path) == made
    changed = await post(client, path, metadata={"topic": "other"})
    assert changed == made | {"metadata": {"topic": "other"}} == await get(client, path)
    more = [
        {"role": "assistant", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
    ]
    added = await post(client, f"{path}/items", items=more)
    assert violations(added, "ConversationItemList") == []
    assert [item["type"] for item in added["data"]] == ["message", "function_call", "function_call_output"]
    listed = await get(client, f"{path}/items", order="asc")
    assert violations(listed, "ConversationItemList") == []
    assert listed["data"][1:] == added["data"]
    one = listed["data"][0]
    assert await get(client, f"{path}/items/{one['id']}") == one
    assert violations(one, "ConversationItem") == []
    answer = await client.delete(f"{path}/items/{one['id']}")
    assert answer.json() == changed
    assert (await get(client, f"{path}/items/{one['id']}", 404))["error"]["param"] == "item_id"
    assert (await get(client, f"{path}/items", order="asc"))["data"] == added["data"]
    deleted = (await client.delete(path)).json()
    assert violations(deleted, "DeletedConversationResource") == []
    for answer in (await client.get(path), await client.delete(path), await client.get(f"{path}/items")):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "conversation_id"
    for fields in ({"metadata": {}}, {"items": [HI]}):
        where = path if "metadata" in fields else f"{path}/items"
        assert (await post(client, where, 404, **fields))["error"]["param"] == "conversation_id"


async def test_pages(client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/conversations", items=[{"role": "user", "content": str(n)} for n in range(7)])
    path = f"/v1/conversations/{made['id']}/items"
    for order, expected in (("desc", "6543210"), ("asc", "0123456")):
        found, after = [], {}
        while True:
            page = await get(client, path, limit=3, order=order, **after)
            found += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert "".join(texts(found)) == expected
    assert await get(client, path, order="asc", after=page["last_id"]) == {
        "object": "list", "data": [], "has_more": False, "first_id": "", "last_id": "",
    }  # fmt: skip
    for name, value in (("limit", "0"), ("limit", "101"), ("order", "up"), ("after", "msg_1"), ("zzz", "1")):
        assert (await get(client, path, 400, **{name: value}))["error"]["param"] == name


async def test_an_item_is_there_once(client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/conversations", items=[HI | {"id": "msg_a"}])
    path = f"/v1/conversations/{made['id']}/items"
    error = (await post(client, path, 400, items=[HI | {"id": "msg_b"}, HI | {"id": "msg_a"}]))["error"]
    assert error["param"] == "items[1].id"
    error = (await post(client, path, 400, items=[HI, HI | {"id": "msg_b"}, HI | {"id": "msg_b"}]))["error"]
    assert error["param"] == "items[2].id"
    assert [item["id"] for item in (await get(client, path))["data"]] == ["msg_a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_a_response_continues_and_adds(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, stream: bool, store: bool
) -> None:
    made = await post(client, "/v1/conversations", items=[HI])
    options = {"model": MODEL, "stream": stream, "store": store}

    async def respond(conversation: Any, text: str) -> dict[str, Any]:
        answer = await client.post("/v1/responses", json=options | {"conversation": conversation, "input": text})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = typed_events(answer.text)[-1]["response"] if stream else answer.json()
        return found

    first = await respond(made["id"], "One")
    assert first["conversation"] == {"id": made["id"]}
    assert violations(first, "Response") == []
    assert rendered_messages(llm) == [("user", "Hi"), ("user", "One")]
    second = await respond({"id": made["id"]}, "Two")
    answers = [texts(response["output"])[0] for response in (first, second)]
    assert rendered_messages(llm) == [("user", "Hi"), ("user", "One"), ("assistant", answers[0]), ("user", "Two")]
    listed = (await get(client, f"/v1/conversations/{made['id']}/items", order="asc"))["data"]
    assert texts(listed) == ["Hi", "One", answers[0], "Two", answers[1]]
    assert violations({"object": "list", "data": listed, "has_more": False, "first_id": "", "last_id": ""},
                      "ConversationItemList") == []  # fmt: skip


async def test_an_item_of_the_conversation_is_referenced_and_not_added_again(
    client: httpx.AsyncClient, llm: FakeAsyncLLM
) -> None:
    made = await post(client, "/v1/conversations", items=[HI | {"id": "msg_a"}, HI])
    reference = {"type": "item_reference", "id": "msg_a"}
    await post(client, "/v1/responses", model=MODEL, conversation=made["id"], input=[reference])
    assert rendered_messages(llm) == [("user", "Hi")] * 3
    listed = (await get(client, f"/v1/conversations/{made['id']}/items"))["data"]
    assert [item["role"] for item in listed] == ["assistant", "user", "user"]


async def test_an_input_has_no_id_of_another_item(client: httpx.AsyncClient) -> None:
    """An item that is sent again stays in its place. The model's items may come again in another form."""
    made = await post(client, "/v1/conversations", items=[HI | {"id": "msg_a"}])
    options = {"model": MODEL, "conversation": made["id"]}
    (answer,) = (await post(client, "/v1/responses", **options, input=[HI | {"id": "msg_a"}, HI]))["output"]
    bye = {"role": "user", "content": "Bye"}
    for given in ([HI, bye | {"id": "msg_a"}], [HI | {"id": "msg_b"}, bye | {"id": "msg_b"}]):
        error = (await post(client, "/v1/responses", 400, **options, input=given))["error"]
        assert error["param"] == "input[1].id"
    shortened = {"type": "message", "role": "assistant", "id": answer["id"], "content": "…"}
    await post(client, "/v1/responses", **options, input=[shortened, bye])
    listed = (await get(client, f"/v1/conversations/{made['id']}/items", order="asc"))["data"]
    assert [item["role"] for item in listed] == ["user", "user", "assistant", "user", "assistant"]


async def test_what_fails_adds_nothing(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    made = await post(client, "/v1/conversations", items=[HI])
    llm.fail_after = 1
    answer = await client.post(
        "/v1/responses", json={"model": MODEL, "conversation": made["id"], "input": "One", "stream": True}
    )
    assert typed_events(answer.text)[-1]["type"] == "response.failed"
    assert texts((await get(client, f"/v1/conversations/{made['id']}/items"))["data"]) == ["Hi"]


async def test_refusals(client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/conversations", items=[HI])
    options = {"model": MODEL, "input": "Hi"}
    first = await post(client, "/v1/responses", **options, conversation=made["id"])
    both = {"conversation": made["id"], "previous_response_id": first["id"]}
    assert (await post(client, "/v1/responses", 400, **options, **both))["error"]["param"] == "conversation"
    # Without the conversation's items the answer would be different.
    alone = {"previous_response_id": first["id"]}
    error = (await post(client, "/v1/responses", 400, **options, **alone))["error"]
    assert error["param"] == "previous_response_id"
    unknown = await post(client, "/v1/responses", 404, **options, conversation="conv_unknown")
    assert unknown["error"]["param"] == "conversation"


async def test_a_conversation_is_its_keys_own(llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: alice-secret,bob: bob-secret")
    app = build_asgi_app(llm, Config.model_validate({"ingress": {"api_keys_env": "KEYS"}}))  # type: ignore[arg-type]
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer alice-secret"
        made = await post(client, "/v1/conversations", items=[HI])
        path = f"/v1/conversations/{made['id']}"
        (item,) = (await get(client, f"{path}/items"))["data"]
        client.headers["authorization"] = "Bearer bob-secret"
        for answer in (
            await client.get(path),
            await client.delete(path),
            await client.post(path, json={"metadata": {}}),
            await client.get(f"{path}/items"),
            await client.post(f"{path}/items", json={"items": [HI]}),
            await client.get(f"{path}/items/{item['id']}"),
            await client.delete(f"{path}/items/{item['id']}"),
            await client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "conversation": made["id"]}),
        ):
            assert answer.status_code == 404, answer.text
        client.headers["authorization"] = "Bearer alice-secret"
        assert (await get(client, f"{path}/items"))["data"] == [item]


async def test_the_official_client(app: Starlette) -> None:
    async with client_of(app) as http:
        api = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
        made = await api.conversations.create(items=[{"role": "user", "content": "Hi"}], metadata={"a": "b"})
        response = await api.responses.create(model=MODEL, input="One", conversation=made.id)
        assert response.conversation is not None
        assert response.conversation.id == made.id
        items = [item async for item in api.conversations.items.list(made.id, limit=2, order="asc")]
        assert [item.role for item in items if item.type == "message"] == ["user", "user", "assistant"]
        await api.conversations.items.create(made.id, items=[{"role": "user", "content": "More"}])
        assert (await api.conversations.update(made.id, metadata={"a": "c"})).metadata == {"a": "c"}
        assert (await api.conversations.items.delete(items[0].id, conversation_id=made.id)).id == made.id
        assert (await api.conversations.delete(made.id)).deleted


async def test_a_background_response_adds_its_turn_once(place: Place) -> None:
    store = ResponseStore(place.open(Clock()))
    await store.create_conversation("", Conversation("conv", "{}", 0), [])
    turn = ConversationTurn("conv", [("a", b'{"id": "a"}'), ("b", b'{"id": "b"}')])
    await store.put("", "r", record(status="in_progress"), None, b"{}", "first")
    await store.put("", "r", record(), None, None, "another", None, turn)
    assert await store.items("", "conv") == []
    for _ in range(2):
        await store.put("", "r", record(), None, None, "first", ToldEvents(0, 0, b"[]"), turn)
    assert await store.items("", "conv") == [b'{"id": "a"}', b'{"id": "b"}']
    await store.put("", "s", record(), None, None, None, None, ConversationTurn("conv", [("c", b"{}")]))
    assert await store.items("", "conv") == [b'{"id": "a"}', b'{"id": "b"}', b"{}"]


async def test_they_survive_a_restart(place: Place) -> None:
    store = ResponseStore(place.open())
    await store.create_conversation("", Conversation("conv", "{}", 7), [("a", b"{}")])
    again = ResponseStore(place.open())
    assert await again.conversation("", "conv") == Conversation("conv", "{}", 7)
    assert await again.items("", "conv") == [b"{}"]


async def test_the_least_recently_used_makes_room(place: Place) -> None:
    def item(name: str) -> tuple[str, bytes]:
        return name, b'"' + b"x" * 1000 + b'"'

    store = ResponseStore(place.open(Clock()), max_bytes=6000)
    await store.create_conversation("", Conversation("a", "{}", 0), [item("1")])
    await store.put("", "r", record("x" * 1000))
    await store.create_conversation("", Conversation("b", "{}", 0), [])
    await store.create_conversation("other", Conversation("c", "{}", 0), [item("1")] * 1)
    assert await store.items("", "a") is not None  # used more recently than the response
    await store.add_items("", ConversationTurn("b", [item("1"), item("2")]))
    assert await store.get("", "r") is None
    assert await store.conversation("", "a") is not None
    await store.add_items("", ConversationTurn("b", [item("3")]))
    assert await store.conversation("", "a") is None
    for number in range(4, 9):  # its own first items go when nothing else is left
        await store.add_items("", ConversationTurn("b", [item(str(number))]))
    kept = await store.page("", "b", None, 100, True)
    assert kept is not None
    assert 2 <= len(kept) <= 4
    assert await store.item("", "b", "8") is not None
    assert await store.item("", "b", "3") is None
    assert await store.items("other", "c") is not None
    (counted,) = store._one("SELECT size FROM owners WHERE owner = ''")
    (size,) = store._one("SELECT SUM(size) FROM conversations WHERE owner = ''")
    assert counted == size <= 6000
    await store.delete_conversation("", "b")
    assert store._one("SELECT size FROM owners WHERE owner = ''") == (0,)
    assert store._one("SELECT COUNT(*) FROM conversation_items") == (1,)


async def test_turns_at_the_same_time_do_not_mix(client: httpx.AsyncClient) -> None:
    made = await post(client, "/v1/conversations")
    await asyncio.gather(*(
        post(client, "/v1/responses", model=MODEL, conversation=made["id"], input=f"turn {n}") for n in range(8)
    ))  # fmt: skip
    listed = (await get(client, f"/v1/conversations/{made['id']}/items", limit=100))["data"]
    assert [item["role"] for item in listed] == ["assistant", "user"] * 8
    for answer, question in zip(listed[::2], listed[1::2], strict=True):
        assert answer["id"].split("_")[1].split("o")[0] == question["id"].split("_")[1].split("i")[0]
    assert orjson.dumps(listed)

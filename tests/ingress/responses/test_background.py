"""Background responses: followed while they are made, made again after the loss of their maker, no event twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.errors import StoreLostError
from raylm.frontend import AsyncLLM
from raylm.ingress import Surroundings, build_asgi_app
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.database import FileDatabase
from raylm.ingress.responses.store import LEASE_S, ResponseStore
from tests.ingress.harness import client_of, typed_events, until
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of
from tests.ingress.responses.conftest import Place
from tests.ingress.writing_engine import SAID, WritingEngine

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


class PausingEngine(WritingEngine):
    """Sends ``quota`` messages and then nothing, as if its ingress had been killed."""

    def __init__(self, seed: int) -> None:
        super().__init__("e", Random(seed))
        self.quota: int | None = None

    async def outputs(self) -> Any:
        async for said in super().outputs():
            while self.quota == 0:  # noqa: ASYNC110 - until it is ended
                await asyncio.sleep(0.01)
            if self.quota is not None:
                self.quota -= 1
            yield said


class Replica:
    """An ingress on a store. It may take over jobs at once."""

    def __init__(self, place: Place | Path, seed: int = 0) -> None:
        place = place if isinstance(place, Place) else Place(str(place), "")
        config = Config.model_validate({"model": "embedded", "ingress": {"store": place.knob}})
        self.llm, self.engine = AsyncLLM(config), PausingEngine(seed)
        self.llm.add_engine(self.engine)
        app = build_asgi_app(self.llm, config, surroundings=Surroundings(application=place.application))
        take_over, _ = app.state.jobs
        self.responses: CreateResponse = take_over.__self__
        self.responses._store._database.since = 0.0
        self.client = client_of(app)

    async def create(self, **fields: Any) -> httpx.Response:
        body = {"model": "embedded", "input": "Hi", "background": True} | fields
        return await self.client.post(PATH, json=body, timeout=300)

    async def follow(self, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
        query = "stream=true" + ("" if after is None else f"&starting_after={after}")
        answer = await self.client.get(f"{PATH}/{response_id}?{query}", timeout=300)
        assert answer.status_code == 200, answer.text
        text = answer.text.replace(": waiting\n\n", "")
        return typed_events(text) if text else []

    async def end(self) -> None:
        """End like a killed process, without any cleanup."""
        for task in self.responses._background:
            task.cancel()
        self.responses._store._thread.shutdown()
        await self.client.aclose()
        await self.llm.stop()


@asynccontextmanager
async def replica(path: Place | Path, seed: int = 0) -> AsyncIterator[Replica]:
    found = Replica(path, seed)
    yield found
    await found.end()


async def end_leases(store: ResponseStore) -> None:
    await store._do(lambda: store._database.execute("UPDATE responses SET lease = lease - ?", (2 * LEASE_S,)))


async def status(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    """The response after it has ended."""
    async with asyncio.timeout(300):
        while True:
            found: dict[str, Any] = (await client.get(f"{PATH}/{response_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                check(found, "Response")
                return found
            await asyncio.sleep(0.01)


def texts(events: list[dict[str, Any]]) -> dict[tuple[int, str], str]:
    """The joined deltas of each item."""
    found: dict[tuple[int, str], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"], event["type"]
            found[place] = found.get(place, "") + event["delta"]
    return found


async def test_who_follows_knows_the_id_before_anything_is_computed(place: Place) -> None:
    async with replica(place) as one:
        one.engine.quota = 0
        asking = asyncio.create_task(one.create(stream=True, seed=0))
        store = one.responses._store
        async with asyncio.timeout(300):
            while not (found := store._database.execute("SELECT id FROM responses").fetchall()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        told = await store.follow("", found[0][0], -1)
        assert told is not None
        events = httpx.Response(200, content=told[0][0]).json()
        assert [event["type"] for event in events] == ["response.created", "response.queued"]
        assert [event["response"]["status"] for event in events] == ["queued", "queued"]
        one.engine.quota = None
        events = typed_events((await asking).text.replace(": waiting\n\n", ""))
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        for event in events:
            check(event, "ResponseStreamEvent")


async def test_a_response_is_followed_from_anywhere(place: Place) -> None:
    async with replica(place) as one:
        answer = await one.create(stream=True, seed=7, tools=TOOLS, top_logprobs=1)
        events = typed_events(answer.text.replace(": waiting\n\n", ""))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            check(event, "ResponseStreamEvent")
        response_id = events[0]["response"]["id"]
        assert events[-1]["response"] == await status(one.client, response_id)
        for after in (None, 0, 3, len(events) - 2):
            assert await one.follow(response_id, after) == events[0 if after is None else after + 1 :]
        assert (await one.client.get(f"{PATH}/{response_id}?stream=true&starting_after={len(events)}")).text == ""
        unstreamed = (await one.create()).json()["id"]
        await status(one.client, unstreamed)
        assert error_of(await one.client.get(f"{PATH}/{unstreamed}?stream=true"))["param"] == "stream"
        for query in ("starting_after=x", "starting_after=-2", "starting_after=", "include_obfuscation=true"):
            error = error_of(await one.client.get(f"{PATH}/{response_id}?stream=true&{query}"))
            assert error["param"] == query.split("=")[0]


async def test_who_follows_a_response_does_not_read_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record holds the whole conversation, and parsing it blocks the event loop."""
    async with replica(tmp_path / "store") as one:
        events = typed_events((await one.create(stream=True, seed=7)).text.replace(": waiting\n\n", ""))
        response_id = events[0]["response"]["id"]
        await status(one.client, response_id)
        read: list[str] = []
        get = ResponseStore.get

        async def noting(self: ResponseStore, owner: str, response_id: str) -> bytes | None:
            read.append(response_id)
            return await get(self, owner, response_id)

        monkeypatch.setattr(ResponseStore, "get", noting)
        assert await one.follow(response_id) == events
        assert read == []
        unknown = await one.client.get(f"{PATH}/resp_none?stream=true")
        assert error_of(unknown, 404)["param"] == "response_id"


@pytest.mark.parametrize("quota", [0, 1, 4, 9])
@pytest.mark.parametrize("seed", [1, 7])
async def test_a_lost_response_goes_on_elsewhere(place: Place, quota: int, seed: int) -> None:
    fields: dict[str, Any] = {"stream": True, "seed": seed, "tools": TOOLS, "top_logprobs": 1}
    async with replica(place.another()) as calm:
        answer = await calm.create(**fields)
        undisturbed = typed_events(answer.text.replace(": waiting\n\n", ""))
        whole = await status(calm.client, undisturbed[0]["response"]["id"])
    heard = list[dict[str, Any]]()
    first = Replica(place, seed=1)
    first.engine.quota = quota
    asking = asyncio.create_task(first.create(**fields))
    store = first.responses._store
    async with asyncio.timeout(300):
        while first.engine.quota and not asking.done():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        while not (found := store._database.execute("SELECT id FROM responses").fetchall()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await first.responses._store._do(lambda: None)  # earlier writes are stored
    ((response_id,),) = found
    told = await store.follow("", response_id, -1) if quota else None
    if told is not None:
        for batch in told[0]:
            heard += httpx.Response(200, content=batch).json()
    asking.cancel()
    await first.end()
    async with replica(place, seed=5) as second:
        await second.responses.take_over_once()
        assert not second.engine.added  # the lease has not expired
        second.engine.parks = True
        second.responses._store._database.execute("UPDATE responses SET lease = lease - ?", (2 * LEASE_S,))
        await second.responses.take_over_once()
        ended = await status(second.client, response_id)
        heard += await second.follow(response_id, heard[-1]["sequence_number"] if heard else None)
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    assert [heard[0]["type"], heard[-1]["type"]] == ["response.created", "response.completed"]
    assert texts(heard) == texts(undisturbed)
    assert heard[-1]["response"] == ended  # a finished response is not made again
    for item, other in zip(ended["output"], whole["output"], strict=True):
        same = {"id", "call_id"}
        assert {k: v for k, v in item.items() if k not in same} == {k: v for k, v in other.items() if k not in same}
    ids = {event["item"]["id"] for event in heard if event["type"] == "response.output_item.done"}
    assert ids == {item["id"] for item in ended["output"]} == {e["item_id"] for e in heard if "item_id" in e}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_what_was_lost_is_taken_over_by_exactly_one_of_two(place: Place) -> None:
    """As if all processes were killed at once, and two ingresses start with the remaining file."""
    first = Replica(place)
    first.engine.quota = 0
    lost = [(await first.create(seed=seed, stream=None)).json()["id"] for seed in range(20)]
    await end_leases(first.responses._store)
    await first.end()
    async with replica(place, seed=2) as one, replica(place, seed=3) as other:
        for _ in range(2):  # each call takes only some
            await asyncio.gather(one.responses.take_over_once(), other.responses.take_over_once())
        ended = [await status(one.client, response_id) for response_id in lost]
        assert [found["status"] for found in ended] == ["completed"] * 20
        made = [{request.request_id for request in it.engine.added} for it in (one, other)]
        assert set.union(*made) == {*lost}
        assert not set.intersection(*made)
        assert sum(len(it.engine.added) for it in (one, other)) == 20
        assert [await status(other.client, response_id) for response_id in lost] == ended
        await asyncio.gather(one.responses.take_over_once(), other.responses.take_over_once())
        assert sum(len(it.engine.added) for it in (one, other)) == 20


class LostStore(ResponseStore):
    """A store that fails at the writes with the numbers ``at``."""

    def __init__(self, path: str) -> None:
        super().__init__(FileDatabase(path))
        self.at: set[int] = set()
        self._calls = 0

    def _lose(self) -> None:
        self._calls += 1
        if self._calls in self.at:
            raise StoreLostError("The store was lost.")

    async def put(self, *args: Any) -> None:
        await super().put(*args)  # the write succeeds, but its caller gets an error
        self._lose()

    async def append(self, *args: Any) -> None:
        self._lose()
        await super().append(*args)

    async def release(self, *args: Any) -> None:
        self._lose()
        await super().release(*args)


@pytest.mark.parametrize("at", [{2}, {3, 4}, {2, 3, 4}])
async def test_a_response_goes_on_when_the_store_is_lost_meanwhile(tmp_path: Path, at: set[int]) -> None:
    async with replica(tmp_path / "whole") as calm:
        answer = await calm.create(stream=True, seed=7)
        undisturbed = typed_events(answer.text.replace(": waiting\n\n", ""))
    async with replica(tmp_path / "store", seed=3) as one:
        one.responses._store = store = LostStore(str(tmp_path / "store"))
        store.at = at
        asking = asyncio.create_task(one.create(stream=True, seed=7))
        async with asyncio.timeout(300):
            while not asking.done():
                await one.responses.take_over_once()
                if not one.responses._background:
                    await end_leases(store)
                await asyncio.sleep(0.02)
        heard = typed_events((await asking).text.replace(": waiting\n\n", ""))
        assert store._calls >= max(at)
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    assert [heard[0]["type"], heard[-1]["type"]] == ["response.created", "response.completed"]
    assert texts(heard) == texts(undisturbed)


async def test_what_cannot_go_on_fails_with_its_reason(place: Place) -> None:
    first = Replica(place)
    first.engine.quota = 0
    response_id = (await first.create(seed=1)).json()["id"]
    database = first.responses._store._database
    job = database.execute("SELECT job FROM responses").fetchone()[0].replace(b'"embedded"', b'"other"')
    spoilt = "UPDATE responses SET job = ?, lease = 0"
    await first.responses._store._do(lambda: database.execute(spoilt, (job,)))
    await first.end()
    async with replica(place) as second:
        await second.responses.take_over_once()
        found = await status(second.client, response_id)
        assert found["status"] == "failed"
        assert "other" in found["error"]["message"]


async def test_an_ingress_that_ends_leaves_its_responses_to_others(place: Place) -> None:
    first = Replica(place)
    first.engine.quota = 1
    response_id = (await first.create(seed=0)).json()["id"]
    async with replica(place) as second:
        await until(lambda: first.engine.quota == 0)
        await first.responses._requests.drain(0.0)
        while not second.engine.added:
            await second.responses.take_over_once()
        found = await status(second.client, response_id)
        assert found["output"][0]["content"][0]["text"] == SAID[0]
    await first.end()


async def test_a_conversation_goes_on_after_a_restart(place: Place) -> None:
    async with replica(place) as first:
        one = (await first.create(background=False, seed=0)).json()
        two = (await first.create(background=False, seed=0, previous_response_id=one["id"])).json()
    async with replica(place) as second:
        assert (await second.client.get(f"{PATH}/{two['id']}")).json() == two
        answer = await second.create(background=False, seed=0, previous_response_id=two["id"])
        assert answer.status_code == 200
        assert len(second.engine.added[-1].prompt_token_ids) > len(first.engine.added[-1].prompt_token_ids)
        await second.client.delete(f"{PATH}/{one['id']}")
        again = await second.create(background=False, seed=0, previous_response_id=two["id"])
        assert again.json()["output"][0]["content"] == answer.json()["output"][0]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_stored_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with replica(tmp_path / "store") as one:
        store = one.responses._store
        (pages,) = store._one("PRAGMA page_count")
        store._database.execute(f"PRAGMA max_page_count = {pages}")
        metadata = {str(place): "x" * 512 for place in range(16)}
        fields: dict[str, Any] = {"background": False, "seed": 0, "stream": stream, "metadata": metadata}
        answer = await one.create(**fields)
        found = typed_events(answer.text)[-1]["response"] if stream else answer.json()
        assert (found["status"], found["store"]) == ("completed", False)
        assert found["output"][0]["content"][0]["text"] == SAID[0]
        assert any(f"response {found['id']} was sent, but could not be stored" in line for line in caplog.messages)
        assert (await one.client.get(f"{PATH}/{found['id']}")).status_code == 404
        assert error_of(await one.create(seed=0, metadata=metadata), 503)["code"] == "store_lost"
        store._database.execute("PRAGMA max_page_count = 1000000")
        assert (await one.create(**fields)).status_code == 200

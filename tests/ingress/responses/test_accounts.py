"""Resources of a background response, on any replica: queue space, key limits, and a record of the request."""

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
from raylm.frontend import Admission, AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.store import LEASE_S
from tests.frontend.played_engine import PlayedEngine
from tests.ingress.harness import client_of, until
from tests.ingress.refused import error_of
from tests.ingress.writing_engine import TOKENIZER, WritingEngine

PATH = "/v1/responses"
ALICE, BOB, ROOT = ({"x-api-key": f"sk-{name}"} for name in ("alice", "bob", "root"))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Replica:
    """An ingress with keys, on the store in a file. With ``writes`` its engine draws tokens."""

    def __init__(self, folder: Path, alice: str = "", *, writes: bool = False, **ingress: Any) -> None:
        (folder / "keys").write_text(f"alice: sk-alice {alice}\nbob: sk-bob\nroot: sk-root admin\n")
        bounds = {"store": str(folder / "store"), "api_keys_file": str(folder / "keys")} | ingress
        config = Config.model_validate({"model": "embedded", "ingress": bounds})
        self.llm = AsyncLLM(config, Admission(config.ingress.max_queued_requests, config.ingress.max_queued_tokens))
        vocab_size = TOKENIZER.get_vocab_size()
        silent = PlayedEngine("e", max_model_len=4096, vocab_size=vocab_size)
        self.engine = WritingEngine("e", Random(0)) if writes else silent
        self.llm.add_engine(self.engine)
        app = build_asgi_app(self.llm, config)
        take_over, _ = app.state.jobs
        self.responses: CreateResponse = take_over.__self__
        self.client = client_of(app)

    async def create(self, headers: dict[str, str] = ALICE, **fields: Any) -> httpx.Response:
        body = {"model": "embedded", "input": "Hi", "background": True} | fields
        return await self.client.post(PATH, json=body, headers=headers, timeout=300)

    async def ended(self, response_id: str, headers: dict[str, str] = ALICE) -> dict[str, Any]:
        async with asyncio.timeout(300):
            while True:
                found: dict[str, Any] = (await self.client.get(f"{PATH}/{response_id}", headers=headers)).json()
                if found["status"] not in ("queued", "in_progress"):
                    return found
                await asyncio.sleep(0.01)

    async def in_flight(self, headers: dict[str, str] = ALICE) -> list[dict[str, Any]]:
        found = await self.client.get("/v1/requests?state=in_flight", headers=headers)
        data: list[dict[str, Any]] = found.json()["data"]
        return data

    async def lose_makers(self) -> None:
        """Expire the leases of all makers, as if they were lost."""
        database = self.responses._store._database
        gone = "UPDATE responses SET lease = lease - ?, maker = 'gone'"
        await self.responses._store._do(lambda: database.execute(gone, (2 * LEASE_S,)))

    async def end(self) -> None:
        for task in self.responses._background:
            task.cancel()
        await asyncio.gather(*self.responses._background, return_exceptions=True)
        self.responses._store._thread.shutdown()
        await self.client.aclose()
        await self.llm.stop()


@asynccontextmanager
async def replica(folder: Path, alice: str = "", **kinds: Any) -> AsyncIterator[Replica]:
    found = Replica(folder, alice, **kinds)
    yield found
    await found.end()


async def test_all_that_are_accepted_in_a_burst_are_made(tmp_path: Path) -> None:
    async with replica(tmp_path, writes=True, max_queued_requests=10) as one:

        async def client(number: int) -> list[httpx.Response]:
            return [await one.create(seed=turn, input=f"Hi {number}") for turn in range(8)]

        answers = [answer for some in await asyncio.gather(*map(client, range(24))) for answer in some]
        accepted = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert {(await one.ended(response_id))["status"] for response_id in accepted} == {"completed"}
        await until(lambda: not one.responses._background)
        assert (one.llm.admission.requests, one.responses._requests.num_ongoing) == (0, 0)


async def test_a_response_is_made_in_the_place_of_its_request(tmp_path: Path) -> None:
    async with replica(tmp_path, max_ongoing_requests=1, max_queued_requests=1) as one:
        asking = asyncio.create_task(one.create(stream=True))
        await until(lambda: len(one.engine.added) == 1)
        assert one.responses._requests.num_ongoing == one.llm.admission.requests == 1
        assert error_of(await one.create(), 429)["message"].startswith("The server holds as many requests")
        one.engine.say((one.engine.added[0].key, 0, [5, 5], "stop"))
        assert "response.completed" in (await asking).text
        await until(lambda: not one.responses._background)
        assert one.responses._requests.num_ongoing == one.llm.admission.requests == 0


async def test_what_no_minute_has_room_for_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    async with replica(tmp_path, "tokens_per_minute=150") as one:
        accepted = await one.create(max_output_tokens=100)
        refused = await one.create(max_output_tokens=100)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert error_of(await one.create(max_output_tokens=200))["param"] == "max_output_tokens"
        await until(lambda: len(one.engine.added) == 1)
        one.engine.say((one.engine.added[0].key, 0, [5], "stop"))
        assert (await one.ended(accepted.json()["id"]))["status"] == "completed"
        count = one.responses._store._database.execute("SELECT COUNT(*) FROM responses").fetchone()
        assert count == (1,)


async def test_without_room_or_engines_a_queued_response_waits(tmp_path: Path) -> None:
    async with replica(tmp_path, "concurrency=1", max_ongoing_requests=1) as one:
        response_id = (await one.create()).json()["id"]
        await until(lambda: len(one.engine.added) == 1)
        await one.lose_makers()
        await one.responses.take_over_once()  # its former maker holds the only place
        await until(lambda: len(one.responses._background) == 1)
        assert len(one.engine.added) == 1
        one.engine.say((one.engine.added[0].key, 0, [5], "stop"))  # another has it: no effect
        await until(lambda: not one.responses._background)
        assert (await one.client.get(f"{PATH}/{response_id}", headers=ALICE)).json()["status"] == "queued"
        await one.responses.take_over_once()
        await until(lambda: len(one.engine.added) == 2)
        one.engine.say((one.engine.added[1].key, 0, [5], "stop"))
        assert (await one.ended(response_id))["status"] == "completed"


async def test_who_takes_a_response_over_serves_it_for_its_key(tmp_path: Path) -> None:
    limits = "max_output=20 tokens_per_minute=100 weight=0.5 concurrency=1"
    async with replica(tmp_path, limits) as first:
        headers = ALICE | {"x-raylm-itl-ms": "70", "traceparent": TRACE}
        response_id = (await first.create(headers)).json()["id"]
        await until(lambda: len(first.engine.added) == 1)
        (line,) = await first.in_flight()
        await first.lose_makers()
        async with replica(tmp_path, limits) as second:
            await second.responses.take_over_once()
            await until(lambda: len(second.engine.added) == 1)
            made, again = first.engine.added[0], second.engine.added[0]
            assert (again.params, again.service) == (made.params, made.service)
            assert (again.params.max_tokens, again.service.weight, again.service.itl_s) == (20, 0.5, 0.07)
            (shown,) = await second.in_flight()
            assert [shown[name] for name in ("id", "key", "path")] == [line["id"], "alice", PATH]
            (record,) = second.llm.timelines._in_flight
            assert record.trace == (TRACE, "")
            busy = await second.client.post(PATH, json={"model": "embedded", "input": "x"}, headers=ALICE)
            assert "'concurrency' of 1" in error_of(busy, 429)["message"]
            second.engine.say((again.key, 0, [5, 5, 5], "stop"))
            assert (await second.ended(response_id))["status"] == "completed"


async def test_a_response_in_the_background_is_billed_to_its_key(tmp_path: Path) -> None:
    async with replica(tmp_path, writes=True) as one:
        usage = (await one.ended((await one.create(seed=0)).json()["id"]))["usage"]
        await until(lambda: not one.responses._background)
        metrics = (await one.client.get("/metrics", headers=ROOT)).text
        for kind, name in (("prompt", "input_tokens"), ("generation", "output_tokens")):
            line = f'raylm:key_tokens_total{{key="alice",kind="{kind}",model_name="embedded"}} {usage[name]:.1f}'
            assert line in metrics.splitlines()
        assert not await one.in_flight()
        recent = (await one.client.get("/v1/requests?state=recent", headers=ALICE)).json()["data"]
        assert PATH in [line["path"] for line in recent]


@pytest.mark.parametrize("begun", [False, True])
async def test_its_owner_sees_and_ends_a_response_in_the_background(tmp_path: Path, begun: bool) -> None:
    async with replica(tmp_path) as one:
        response_id = (await one.create()).json()["id"]
        await until(lambda: len(one.engine.added) == 1)
        if begun:
            one.engine.say((one.engine.added[0].key, 0, [5], None))
            async with asyncio.timeout(300):
                while (await one.client.get(f"{PATH}/{response_id}", headers=ALICE)).json()["status"] == "queued":
                    pass
        (line,) = await one.in_flight()
        assert (line["key"], line["path"]) == ("alice", PATH)
        assert (await one.client.delete(f"/v1/requests/{line['id']}", headers=BOB)).status_code == 404
        assert (await one.client.delete(f"/v1/requests/{line['id']}", headers=ALICE)).status_code == 200
        found = await one.ended(response_id)
        assert (found["status"], found["error"]) == ("cancelled", None), "as with POST /v1/responses/ID/cancel"
        await until(lambda: bool(one.engine.aborted))
        await until(lambda: not one.responses._background)
        assert not await one.responses._store.renew("other", 9)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_no_minute_has_room_for_is_refused_at_once(tmp_path: Path, stream: bool) -> None:
    async with replica(tmp_path, "tokens_per_minute=150") as one:
        refused = await one.create(input="word " * 300, stream=stream)
        assert error_of(refused, 400)["param"] == "input"
        assert one.responses._store._database.execute("SELECT COUNT(*) FROM responses").fetchone() == (0,)


async def test_a_response_that_is_taken_over_is_no_further_request(tmp_path: Path) -> None:
    """However often it is taken over while there is no engine for it."""
    limits = "requests_per_minute=2 concurrency=2"
    async with replica(tmp_path, limits) as first:
        response_id = (await first.create()).json()["id"]
        await until(lambda: len(first.engine.added) == 1)
        async with replica(tmp_path, limits) as second:
            for number in range(1, 4):
                await first.lose_makers()
                await second.responses.take_over_once()
                await until(lambda: len(second.engine.added) == number)  # noqa: B023
                for task in second.responses._background:
                    task.cancel()
                await until(lambda: not second.responses._background)
                again = "UPDATE responses SET makers = 0"
                await second.responses._store._do(lambda: second.responses._store._database.execute(again))  # noqa: B023
            asked = second.client.post(PATH, json={"model": "embedded", "input": "x"}, headers=ALICE)
            asking = asyncio.create_task(asked)
            await until(lambda: len(second.engine.added) == 4)
            second.engine.say((second.engine.added[-1].key, 0, [5], "stop"))
            assert (await asking).headers["x-ratelimit-remaining-requests"] == "1"
            await first.lose_makers()
            await second.responses.take_over_once()
            await until(lambda: len(second.engine.added) == 5)
            second.engine.say((second.engine.added[-1].key, 0, [5], "stop"))
            assert (await second.ended(response_id))["status"] == "completed"

"""GET /v1/requests over the whole stack without a model: records with phases, access to them, and ending a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.frontend import Requests, Timelines
from raylm.ingress import build_asgi_app
from raylm.ingress.console.peers import Answers, Desk, Peers
from raylm.ingress.routes import Surroundings
from tests.ingress.console.stack import LOCAL, SMALL, Stack, check_adds_up, life_of
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import client_of, events, until
from tests.ingress.refused import error_of
from tests.ingress.test_real_llm import PROMPT, TEXT


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as stack:
        yield stack


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.client() as client:
        yield client


async def test_a_life_has_all_its_phases_and_they_add_up(api: httpx.AsyncClient) -> None:
    began = time.time()
    answer = await api.post("/v1/chat/completions", headers={"x-request-id": "mine"}, json={
        "model": "embedded", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 7,
        "stream": True,
    })  # fmt: skip
    ended = time.time()
    assert answer.status_code == 200
    life = await life_of(api, "mine")
    check_adds_up(life)
    assert began <= life["received"] <= life["ended"] <= ended
    assert {"body", "parse", "template", "tokenize", "prefill", "decode"} <= {one["phase"] for one in life["phases"]}
    assert (life["state"], life["status"], life["outcome"]) == ("ended", 200, "length")
    assert (life["path"], life["model"], life["stream"]) == ("/v1/chat/completions", "embedded", True)
    (part,) = life["parts"]
    assert part["completion_tokens"] == [12]
    assert part["max_tokens"] == 12
    assert [one["event"] for one in part["events"]] == ["taken_in", "scheduled", "token", "ended"]
    assert 0 < life["ttft_s"] <= part["last_token_s"] <= life["last_byte_s"] <= life["wall_s"]
    prefill, decode = part["steps"]
    assert (prefill["doing"], decode["doing"]) == ("prefill", "decode")
    assert prefill["tokens"] == part["prompt_tokens"]
    assert decode["tokens"] == 11
    assert prefill["last_step"] + 1 == decode["first_step"]
    assert decode["last_step"] - decode["first_step"] + 1 == 11
    assert PROMPT not in (await api.get("/v1/requests/mine")).text


async def test_several_prompts_and_sequences_are_parts_of_one_request(api: httpx.AsyncClient) -> None:
    body = TEXT | {"prompt": [PROMPT, "Blocks"], "n": 2}
    await api.post("/v1/completions", json=body, headers={"x-request-id": "many"})
    life = await life_of(api, "many")
    check_adds_up(life)
    assert [part["completion_tokens"] for part in life["parts"]] == [[24, 24], [24, 24]]
    for part in life["parts"]:
        assert {one["sequence"] for one in part["steps"]} == {0, 1}


async def test_what_is_refused_is_told_with_its_status(api: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "long"}
    answer = await api.post("/v1/completions", json=TEXT | {"prompt": PROMPT * 40}, headers=headers)
    assert answer.status_code == 400
    life = await life_of(api, "long")
    assert (life["status"], life["outcome"]) == (400, "context_length_exceeded")
    check_adds_up(life)


async def test_requests_are_listed_filtered_and_bounded(api: httpx.AsyncClient) -> None:
    for number in range(4):
        await api.post("/v1/completions", json=TEXT | {"max_tokens": 1}, headers={"x-request-id": f"id-{number}"})
    listed = (await api.get("/v1/requests")).json()
    assert listed["object"] == "list"
    assert listed["missing"] == []
    assert [one["id"] for one in listed["data"]] == ["id-3", "id-2", "id-1", "id-0"]
    found = (await api.get("/v1/requests", params={"q": "ID-2"})).json()["data"]
    assert [one["id"] for one in found] == ["id-2"]
    assert len((await api.get("/v1/requests", params={"limit": 2})).json()["data"]) == 2
    assert (await api.get("/v1/requests", params={"model": "other"})).json()["data"] == []
    newest = listed["data"][0]["ended"]
    newer = (await api.get("/v1/requests", params={"since": newest})).json()["data"]
    assert [one["id"] for one in newer] == ["id-3"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"state": "open"}, "state"), ({"since": "now"}, "since"),
        ({"q": "x" * 257}, "q"), ({"page": "1"}, "page"),
    ],
)  # fmt: skip
async def test_a_wrong_query_is_refused_by_name(api: httpx.AsyncClient, params: dict[str, str], param: str) -> None:
    assert error_of(await api.get("/v1/requests", params=params), 400)["param"] == param


async def test_one_in_flight_is_seen_and_ended() -> None:
    async with Stack(delay_s=0.02) as stack, stack.client() as api:
        body = TEXT | {"max_tokens": 90, "stream": True}
        running = asyncio.create_task(api.post("/v1/completions", json=body, headers={"x-request-id": "slow"}))
        await until(lambda: bool(stack.cores[0].scheduler.running))
        (line,) = (await api.get("/v1/requests", params={"state": "in_flight"})).json()["data"]
        assert (line["id"], line["ended"]) == ("slow", None)
        check_adds_up(await life_of(api, "slow"))
        ended = (await api.delete("/v1/requests/slow")).json()
        assert ended == {"id": "slow", "object": "request", "ended": True}
        answer = await running
        *_, last = [one for one in events(answer.text) if one != "[DONE]"] if answer.status_code == 200 else [{}]
        assert answer.status_code == 499 or last["error"]["code"] == "cancelled"
        await until(lambda: not stack.cores[0].scheduler.has_work)
        life = await life_of(api, "slow")
        assert life["outcome"] == "cancelled"
        assert error_of(await api.delete("/v1/requests/slow"), 404)["param"] == "request_id"
        assert error_of(await api.get("/v1/requests/nobody"), 404)["param"] == "request_id"


async def test_a_trace_has_the_phases_as_slices(api: httpx.AsyncClient) -> None:
    await api.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
    trace = (await api.get("/v1/requests/mine", params={"format": "trace"})).json()
    life = await life_of(api, "mine")
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    row = [event for event in slices if event["tid"] == 0]
    assert [event["name"] for event in row] == [phase["phase"] for phase in life["phases"]]
    for event, later in pairwise(row):
        assert event["ts"] + event["dur"] == pytest.approx(later["ts"], abs=2)
    assert {event["name"] for event in slices if event["tid"] == 1} == {"prefill", "decode"}
    assert error_of(await api.get("/v1/requests/mine", params={"format": "xml"}), 400)["param"] == "format"


# ---------------------------------------------------------------- access


@pytest.mark.parametrize(
    "path", ["/v1/requests", "/v1/requests/mine", "/v1/cluster", "/v1/cluster/history", "/v1/cluster/kv"]
)
@pytest.mark.parametrize(
    ("host", "base_url", "headers"),
    [
        ("10.0.0.7", LOCAL, {}),
        ("127.0.0.1", LOCAL, {"x-forwarded-for": "127.0.0.1, 10.0.0.7"}),
        ("127.0.0.1", "http://example.com", {}),
        ("::ffff:10.0.0.7", LOCAL, {}),
    ],
)
async def test_without_keys_only_this_machine_is_answered(
    stack: Stack, path: str, host: str, base_url: str, headers: dict[str, str]
) -> None:
    async with stack.client(host, base_url, headers=headers) as client:
        assert error_of(await client.get(path), 403)["code"] == "permission_denied"
        assert error_of(await client.delete("/v1/requests/mine"), 403)["code"] == "permission_denied"


@pytest.mark.parametrize(
    ("host", "base_url"), [("10.0.0.7", LOCAL), ("127.0.0.1", "http://example.com"), ("10.0.0.7", "http://example.com")]
)
async def test_without_keys_only_this_machine_changes_adapters(stack: Stack, host: str, base_url: str) -> None:
    body = {"lora_name": "x", "lora_path": "x"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        async with stack.client(host, base_url) as client:
            assert error_of(await client.post(path, json=body), 403)["code"] == "permission_denied"
        async with stack.client() as client:
            assert (await client.post(path, json=body)).json()["error"]["code"] != "permission_denied"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_this_machine_has_several_names(stack: Stack, host: str) -> None:
    async with stack.client(host, headers={"x-forwarded-for": "10.0.0.7, 127.0.0.1"}) as client:
        assert (await client.get("/v1/requests")).status_code == 200


@pytest.mark.parametrize("keys", ["alice: sk-a,bob: sk-b,carol: sk-c admin", "alice: sk-a,bob: sk-b"])
async def test_a_key_sees_its_own(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    monkeypatch.setenv("KEYS", keys)
    async with Stack(ingress={"api_keys_env": "KEYS"}, delay_s=0.005) as stack, stack.client("10.0.0.7") as api:
        alice, bob = {"authorization": "Bearer sk-a"}, {"authorization": "Bearer sk-b"}
        headers = alice | {"x-request-id": "hers"}
        running = asyncio.create_task(api.post("/v1/completions", json=TEXT | {"max_tokens": 90}, headers=headers))
        await until(lambda: bool(stack.cores[0].scheduler.running))
        assert error_of(await api.delete("/v1/requests/hers", headers=bob), 404)
        pools = [(await api.get("/v1/cluster/kv", headers=key)).json()["pools"] for key in (alice, bob)]
        hers, his = [pool[0]["sequences"][0]["request_id"] for pool in pools]
        assert hers.startswith("cmpl-hers")
        assert his == ""
        assert (await running).status_code == 200
        assert [one["key"] for one in (await api.get("/v1/requests", headers=alice)).json()["data"]] == ["alice"]
        assert (await api.get("/v1/requests", headers=bob)).json()["data"] == []
        assert error_of(await api.get("/v1/requests/hers", headers=bob), 404)
        assert (await api.get("/v1/requests/hers", headers=alice)).status_code == 200
        assert error_of(await api.get("/v1/requests"), 401)
        for path in ("/console", "/console/console.js", "/console/console.css", "/console/playground.js"):
            page = await api.get(path)
            assert page.status_code == 200
            assert "unsafe-inline" not in page.headers["content-security-policy"]


@pytest.mark.parametrize("share_prefixes", [False, True])
async def test_a_key_is_not_told_what_another_key_has_sent(
    monkeypatch: pytest.MonkeyPatch, share_prefixes: bool
) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-a,bob: sk-b")
    body = TEXT | {"prompt": "A secret that one of two keys has sent, and that is longer than a block of the cache."}
    async with (
        Stack(ingress={"api_keys_env": "KEYS"}, cache=SMALL["cache"] | {"share_prefixes": share_prefixes}) as stack,
        stack.client("10.0.0.7") as api,
    ):
        cached = []
        for key in ("sk-a", "sk-b", "sk-b"):
            answer = await api.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert [tokens > 0 for tokens in cached] == [False, share_prefixes, True]


# ---------------------------------------------------------------- the cluster


async def test_the_cluster_and_its_pools_are_told() -> None:
    async with Stack(delay_s=0.01) as stack, stack.client() as api:
        body = TEXT | {"max_tokens": 90}
        running = asyncio.create_task(api.post("/v1/completions", json=body, headers={"x-request-id": "held"}))
        await until(lambda: bool(stack.cores[0].scheduler.running))
        (pool,) = (await api.get("/v1/cluster/kv")).json()["pools"]
        (sequence,) = pool["sequences"]
        assert sequence["status"] == "running"
        assert sequence["request_id"].startswith("cmpl-held")
        held = {first + place for first, count in sequence["runs"] for place in range(count)}
        refs = stack.cores[0].scheduler.kv.pool.refs
        assert held <= {block for block, count in enumerate(refs) if count}
        await running
        await until(lambda: not stack.cores[0].scheduler.has_work)
        (pool,) = (await api.get("/v1/cluster/kv")).json()["pools"]
        assert pool["sequences"] == []
        assert sum(count for _, count in pool["cached"]) > 0
        cluster = (await api.get("/v1/cluster")).json()
        (engine,) = cluster["engines"]
        assert (engine["id"], engine["blocks"], engine["generation_tokens"]) == ("e0", 12, 90)
        (ingress,) = cluster["ingresses"]
        assert (ingress["state"], cluster["missing"]) == ("ready", [])


async def test_the_history_is_what_was_seen_of_all_engines() -> None:
    async with Stack(num_engines=2, delay_s=0.01) as stack, stack.client() as api:
        history = stack.app.state.desk.kept
        history.take()
        running = asyncio.create_task(api.post("/v1/completions", json=TEXT | {"max_tokens": 90}))
        await until(lambda: any(engine.running for engine in stack.llm.engine_stats.values()))
        history.take()
        await running
        await until(lambda: not any(engine.running for engine in stack.llm.engine_stats.values()))
        history.take()
        told = (await api.get("/v1/cluster/history")).json()
    assert told["missing"] == []
    before, during, after = told["samples"]
    assert [one["running"] for one in told["samples"]] == [0, 1, 0]
    assert before["generation_tokens"] == {"e0": 0, "e1": 0}
    assert before["kv_usage"] == 0 < during["kv_usage"] <= 0.5  # one of two engines
    assert sum(after["generation_tokens"].values()) == 90
    assert before["at"] <= during["at"] <= after["at"] <= told["now"]


async def test_the_history_is_that_of_the_replica_that_saw_most() -> None:
    young, old = (Desk(FakeAsyncLLM(), Requests(8, Timelines())) for _ in range(2))  # type: ignore[arg-type]
    young.kept.take()
    for _ in range(1000):
        old.kept.take()
    around = Surroundings(create_peers=lambda desk: Both(young, old))
    app = build_asgi_app(FakeAsyncLLM(), Config(), None, around)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 9))
    async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
        told = (await client.get("/v1/cluster/history")).json()
    assert len(told["samples"]) == 300  # ten minutes, one every two seconds


class Both(Peers):
    def __init__(self, *desks: Desk) -> None:
        self._desks = desks

    async def ask(self, method: str, *args: Any) -> Answers:
        return Answers([desk.ask(method, *args)[1] for desk in self._desks], [])


async def test_rays_dashboard_is_named_to_who_may_see_the_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "root: sk-root admin,bob: sk-bob")
    config = Config.model_validate({"ingress": {"api_keys_env": "KEYS"}})
    around = Surroundings(dashboard=lambda: "http://127.0.0.1:8265")
    async with client_of(build_asgi_app(FakeAsyncLLM(), config, None, around)) as client:  # type: ignore[arg-type]
        told = [(await client.get("/v1/cluster", headers={"x-api-key": f"sk-{key}"})).json() for key in ("root", "bob")]
    assert [one["dashboard"] for one in told] == ["http://127.0.0.1:8265", None]

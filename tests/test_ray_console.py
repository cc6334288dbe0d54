"""Two ingress replicas and two engines under Serve: each ingress reports what all of them know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from tests.serving import ARGS, Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]

TWO = {"ingress": {"replicas": 2}, "engine": ARGS.get("engine", {}) | {"replicas": 2}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    with Server(serve_file(tmp_path_factory.mktemp("serve") / "serve.yaml", port, ARGS | TWO), port) as server:
        yield server


async def get(url: str, path: str, **params: Any) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:  # a new connection, so any replica can answer
        answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask(url: str, name: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        body = chat("What is a KV cache?", max_tokens=20)
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
        assert answer.status_code == 200


async def until_both_know_both_engines(url: str) -> None:
    """Wait until both ingresses know both engines. At the start an ingress may know only one of them."""
    knowing: set[str] = set()
    async with asyncio.timeout(300):
        for start in count(step=8):
            names = [f"first-{number}" for number in range(start, start + 8)]  # at once, so that both get some
            await asyncio.gather(*(ask(url, name) for name in names))
            lives = [await get(url, f"/v1/requests/{name}") for name in names]
            knowing |= {life["ingress"] for life in lives if life["parts"][0]["routes"][0]["considered"]}
            if len(knowing) == 2:
                return


async def test_any_ingress_tells_of_all(server: Server) -> None:
    await until_both_know_both_engines(server.url)
    names = [f"request-{number}" for number in range(24)]
    await asyncio.gather(*(ask(server.url, name) for name in names))
    for _ in range(6):
        listed = await get(server.url, "/v1/requests", limit=100)
        assert {line["id"] for line in listed["data"]} >= {*names}
        assert listed["missing"] == []
        assert len({line["ingress"] for line in listed["data"]}) == 2
    lives = [await get(server.url, f"/v1/requests/{name}") for name in names]
    for life in lives:
        total = sum(phase["seconds"] for phase in life["phases"])
        assert total == pytest.approx(life["wall_s"], rel=0.01, abs=1e-3)
        assert [one["event"] for one in life["parts"][0]["events"]] == ["taken_in", "scheduled", "token", "ended"]
        assert len(life["parts"][0]["routes"][0]["considered"]) == 2


async def test_the_actors_are_told_as_ray_knows_them(server: Server) -> None:
    cluster = await get(server.url, "/v1/cluster")
    assert len(cluster["ingresses"]) == len(cluster["engines"]) == 2
    alive = [actor for actor in cluster["actors"] if actor["state"] == "alive"]
    kinds = sorted(actor["kind"] for actor in alive)
    assert kinds == sorted(["Ingress", "Engine", "EngineCore", "Worker"] * 2)
    assert {actor["pid"] for actor in alive} <= {*server.processes()}
    pools = (await get(server.url, "/v1/cluster/kv"))["pools"]
    assert {pool["engine"] for pool in pools} == {engine["id"] for engine in cluster["engines"]}


async def test_one_in_flight_anywhere_is_ended(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        body = chat("Count.", stream=True, ignore_eos=True, max_tokens=1500)
        headers = {"x-request-id": "endless"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as other:
                assert (await other.delete("/v1/requests/endless")).json()["ended"]
            rest = [line async for line in lines if line]
    assert "cancelled" in rest[-1]

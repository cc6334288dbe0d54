"""Discovery without Ray: what it does when Ray's control plane does not answer."""

from __future__ import annotations

import asyncio

import pytest

from raylm.engine import NAMESPACE
from raylm.frontend.engines import discovery


class Client:
    """All that Discovery asks of a client."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.draining = False


async def test_an_engine_is_found_after_looks_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0
    client = Client()

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise ConnectionError("the control plane is away")
        names = [("EngineCore:a", NAMESPACE), ("EngineCore:b", "another"), ("Other", NAMESPACE)]
        return [{"name": name, "namespace": namespace} for name, namespace in names]

    async def connect(core: object) -> Client:
        assert core == "the actor EngineCore:a"
        return client

    monkeypatch.setattr(discovery, "list_named_actors", list_named_actors)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: f"the actor {name}")
    monkeypatch.setattr(discovery.RayEngineClient, "connect", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = discovery.Discovery("EngineCore:", found.put_nowait)
    async with asyncio.timeout(30):
        assert await found.get() is client
    assert [record.getMessage() for record in caplog.records] == [
        "Ray could not be asked for engines, and will be again: the control plane is away"
    ] * 2
    watching.stop()


async def test_a_line_that_is_lost_to_an_engine_that_lives_is_told_and_one_that_drains_is_left_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [Client(), Client()]
    waiting = iter(clients)

    async def connect(core: object) -> Client:
        return next(waiting)

    listed = [{"name": "EngineCore:a", "namespace": NAMESPACE}]
    monkeypatch.setattr(discovery, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery, "RECONNECT_S", 0.001)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(discovery.RayEngineClient, "connect", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = discovery.Discovery("EngineCore:", found.put_nowait)
    async with asyncio.timeout(30):
        assert await found.get() is clients[0]
        clients[0].left.set()
        assert await found.get() is clients[1]
    clients[1].draining = True
    clients[1].left.set()
    await asyncio.sleep(0.05)
    assert found.empty()
    assert [record.getMessage() for record in caplog.records] == [
        "The line to EngineCore:a was lost, which lives; it is opened again."
    ]
    watching.stop()

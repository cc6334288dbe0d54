"""Discovery, tested without Ray: its behaviour when Ray's control plane does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from raylm.engine import NAMESPACE
from raylm.frontend.engines import discovery
from raylm.messages import EngineInfo
from tests.frontend.played_engine import PlayedEngine


class Client:
    """The attributes of a client that Discovery uses."""

    def __init__(self, fingerprint: str = "fp_1") -> None:
        self.left = asyncio.Event()
        self.draining = self.dropped = False
        self.info = PlayedEngine("a", fingerprint=fingerprint).info


class Discovery(discovery.Discovery):
    """Counts its looks for engines."""

    looks = 0

    def _names(self) -> set[discovery.EngineName]:
        self.looks += 1
        return super()._names()

    async def looked(self, times: int = 50) -> None:
        """Wait for ``times`` more looks. Each could find an engine that must not be connected."""
        until = self.looks + times
        async with asyncio.timeout(300):
            while self.looks < until:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


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
        names = [("EngineCore:app:d:a", NAMESPACE), ("EngineCore:app:d:b", "another"), ("Other", NAMESPACE)]
        return [{"name": name, "namespace": namespace} for name, namespace in names]

    async def connect(core: object) -> Client:
        assert core == "the actor EngineCore:app:d:a"
        return client

    monkeypatch.setattr(discovery, "list_named_actors", list_named_actors)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: f"the actor {name}")
    monkeypatch.setattr(discovery, "connect_engine", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "d", found.put_nowait)
    async with asyncio.timeout(300):
        assert await found.get() is client
    assert [record.getMessage() for record in caplog.records] == [
        "could not list engines from Ray, trying again: the control plane is away"
    ] * 2
    watching.stop()


def list_one_engine(monkeypatch: pytest.MonkeyPatch, connect: Callable[[object], Awaitable[Client]]) -> None:
    """Let a Discovery find one engine, look every millisecond, and use ``connect`` for it."""
    listed = [{"name": "EngineCore:app:d:a", "namespace": NAMESPACE}]
    monkeypatch.setattr(discovery, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery, "RECONNECT_S", 0.001)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(discovery, "connect_engine", connect)


async def test_a_line_that_is_lost_to_an_engine_that_lives_is_told_and_one_that_drains_is_left_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [Client(), Client()]
    waiting = iter(clients)

    async def connect(core: object) -> Client:
        return next(waiting)

    list_one_engine(monkeypatch, connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "d", found.put_nowait)
    async with asyncio.timeout(300):
        assert await found.get() is clients[0]
        clients[0].left.set()
        assert await found.get() is clients[1]
    clients[1].draining = True
    clients[1].left.set()
    await watching.looked()
    assert found.empty()
    assert [record.getMessage() for record in caplog.records] == [
        "lost the connection to EngineCore:app:d:a, which is alive; connecting again"
    ]
    watching.stop()


async def test_an_engine_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, tries = Client(), 0

    async def connect(core: object) -> Client:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TimeoutError
        return client

    list_one_engine(monkeypatch, connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "d", found.put_nowait)
    async with asyncio.timeout(10):
        assert await found.get() is client
    assert [record.getMessage() for record in caplog.records] == [
        "EngineCore:app:d:a does not answer, and is asked again."
    ] * 2
    watching.stop()


async def test_the_line_to_an_engine_that_dropped_this_client_is_opened_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = [Client(), Client()]
    waiting = iter(clients)

    async def connect(core: object) -> Client:
        return next(waiting)

    listed = [{"name": "EngineCore:app:d:a", "namespace": NAMESPACE}]
    monkeypatch.setattr(discovery, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery, "RECONNECT_S", 3600)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(discovery, "connect_engine", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "d", found.put_nowait)
    async with asyncio.timeout(300):
        assert await found.get() is clients[0]
        clients[0].dropped = True
        clients[0].left.set()
        assert await found.get() is clients[1]
    watching.stop()


async def test_engines_are_looked_for_seldom_once_none_comes_or_goes_and_at_once_when_one_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients, now = [Client(), Client()], 0.0
    waiting = iter(clients)

    async def connect(core: object) -> Client:
        return next(waiting)

    listed = [{"name": "EngineCore:app:d:a", "namespace": NAMESPACE}]
    monkeypatch.setattr(discovery, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery, "SETTLED_PERIOD_S", 3600)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(discovery, "connect_engine", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "d", found.put_nowait)
    without_engines = Discovery("other", "d", found.put_nowait)
    async with asyncio.timeout(300):
        assert await found.get() is clients[0]
        await watching.looked()
        now += discovery.SETTLING_S + 1
        await without_engines.looked()  # meanwhile the other one's last look ends
        settled = watching.looks
        await without_engines.looked()
        assert watching.looks == settled
        clients[0].dropped = True
        clients[0].left.set()
        assert await found.get() is clients[1]
    watching.stop()
    without_engines.stop()


class Core:
    """The handle of a ready EngineCore."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.info = SimpleNamespace(remote=self._info)

    async def _info(self) -> EngineInfo:
        return self.client.info


async def test_an_engine_of_another_configuration_is_taken_if_it_gives_the_tokens_of_one_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only after an engine of this configuration exists, and never from another model."""
    clients = {
        "EngineCore:app:new:a": Client("fp_1"),
        "EngineCore:app:old:b": Client("fp_1"),
        "EngineCore:app:old:c": Client("fp_2"),
        "EngineCore:app:old:app:new:d": Client("fp_1"),
    }
    listed = [name for name in clients if name != "EngineCore:app:new:a"]

    async def connect(core: Core) -> Client:
        return core.client

    monkeypatch.setattr(
        discovery, "list_named_actors", lambda all_namespaces: [{"name": n, "namespace": NAMESPACE} for n in listed]
    )
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    monkeypatch.setattr(discovery.ray, "get_actor", lambda name, namespace: Core(clients[name]))
    monkeypatch.setattr(discovery, "connect_engine", connect)
    found: asyncio.Queue[object] = asyncio.Queue()
    watching = Discovery("app", "new", found.put_nowait)
    await watching.looked()
    assert found.empty()
    listed.append("EngineCore:app:new:a")
    async with asyncio.timeout(300):
        assert await found.get() is clients["EngineCore:app:new:a"]
        assert await found.get() is clients["EngineCore:app:old:b"]
    await watching.looked()
    assert found.empty()
    watching.stop()

"""An EngineCore and its clients over sockets: ordered outputs, slow clients that delay no other, and noticed ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from raylm.config import CacheConfig, Config
from raylm.engine import EngineCore, Link
from raylm.engine.client_link import ClientLink
from raylm.engine.link import BEAT_S
from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError
from raylm.messages import ClientBatch, EngineCoreOutputs
from tests.engine.build import request
from tests.fakes import FakeExecutor, FakeModel, FakeWorker

PROMPT = [3, 4, 5]
OPEN: list[Link] = []  # links of the running test


class Client:
    """The client's end of a ClientLink."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received: list[Any] = []
        self.ends: list[str] = []
        self.link = Link(self.received.append, self.ends.append)

    async def connect(self, core: EngineCore) -> None:
        here, there = socket.socketpair()
        loop = asyncio.get_running_loop()
        self.server = ClientLink(core)
        await loop.connect_accepted_socket(lambda: self.server.link, there)
        await loop.connect_accepted_socket(lambda: self.link, here)
        OPEN.extend((self.link, self.server.link))
        self.link.send(self.name)

    def add(self, tokens: int, key: int = 1) -> None:
        self.link.send(ClientBatch([request(PROMPT, key, max_tokens=tokens, ignore_eos=True)], []))

    @property
    def tokens(self) -> list[int]:
        return [token for outputs in self.received for token in getattr(outputs, "token_ids", ())]

    @property
    def is_done(self) -> bool:
        return any(reason for outputs in self.received for reason in getattr(outputs, "finish_reasons", ()))


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


@pytest.fixture
async def core() -> AsyncIterator[EngineCore]:
    worker = FakeWorker(num_blocks=600, max_model_len=4000)
    core = EngineCore(Config(cache=CacheConfig(num_blocks=600)), FakeExecutor(worker, delay_s=0.0005))
    await core.start()
    run = asyncio.create_task(core.run())
    yield core
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await core.shutdown()


@pytest.fixture(autouse=True)
async def _close() -> AsyncIterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()
    await asyncio.sleep(0)  # so that the event loop closes the sockets


def is_idle(core: EngineCore) -> bool:
    return not core.scheduler.has_work


async def test_each_client_gets_its_tokens_and_adapters_at_once(core: EngineCore) -> None:
    clients = [Client("a"), Client("b")]
    for client, tokens in zip(clients, (30, 50), strict=True):
        await client.connect(core)
        client.add(tokens)
    await until(lambda: all(client.is_done for client in clients))
    assert [client.tokens for client in clients] == [FakeModel().continuation(PROMPT, 7, count) for count in (30, 50)]
    assert all(client.received[0].adapters == () for client in clients)
    for client in clients:
        client.link.close()
    await until(lambda: not core.has_clients)


async def test_a_client_that_does_not_read_stalls_nobody_and_loses_nothing(core: EngineCore) -> None:
    slow, fast = Client("slow"), Client("fast")
    await slow.connect(core)
    await fast.connect(core)
    slow.link.pause()
    slow.add(700)
    fast.add(800)
    await until(lambda: fast.is_done and is_idle(core))
    read = len(slow.received)
    slow.link.resume()
    await until(lambda: slow.is_done)
    assert slow.tokens == FakeModel().continuation(PROMPT, 7, 700)
    assert len(slow.received) - read < 300, "the outbox merged outputs that did not fit into the socket"


async def test_the_end_of_a_link_ends_what_its_client_had_open(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    leaver, stayer = Client("leaver"), Client("stayer")
    for client in (leaver, stayer):
        await client.connect(core)
        client.add(3000)
    await until(lambda: leaver.tokens and stayer.tokens)
    leaver.link.close()
    await until(lambda: core.held_requests == 1)
    assert "an ingress is gone; its 1 open requests end" in caplog.text
    assert stayer.ends == []
    stayer.link.send(ClientBatch([], [1]))
    await until(lambda: is_idle(core))


async def test_a_silent_client_is_given_up_and_hears_that_the_engine_lives(core: EngineCore) -> None:
    client = Client("silent")
    await client.connect(core)
    client.add(3900)
    await until(lambda: client.tokens)
    client.server.link.set_limit(3 * BEAT_S)
    client.link._silence.stop()
    await until(lambda: client.ends)
    assert type(client.received[-1]) is EngineUnavailableError
    await until(lambda: is_idle(core))


async def test_a_batch_that_the_engine_cannot_take_ends_the_link_alone(core: EngineCore) -> None:
    client, other = Client("broken"), Client("other")
    await client.connect(core)
    await other.connect(core)
    client.link.send(ClientBatch(["no request"], []))  # type: ignore[list-item]
    await until(lambda: client.ends)
    assert type(client.received[-1]) is EngineUnavailableError
    other.add(5)
    await until(lambda: other.is_done)


async def test_the_end_of_the_engine_is_told_with_its_reason() -> None:
    core = EngineCore(Config(cache=CacheConfig(num_blocks=40)), FakeExecutor(FakeWorker(num_blocks=40)))
    await core.start()
    run = asyncio.create_task(core.run())
    client = Client("a")
    await client.connect(core)
    await until(lambda: client.received)
    crashed = EngineCrashedError("The worker crashed: Fatal Python error: Segmentation fault")
    core._executor.on_lost(crashed)
    with pytest.raises(EngineDiedError, match="Segmentation fault"):
        async with asyncio.timeout(300):
            await run
    await until(lambda: client.ends)
    assert isinstance(client.received[0], EngineCoreOutputs)
    assert type(client.received[-1]) is EngineCrashedError
    assert not core.has_clients
    late = Client("late")
    await late.connect(core)
    await until(lambda: late.ends)
    assert [type(value) for value in late.received] == [EngineCrashedError]

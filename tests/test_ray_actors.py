"""EngineCore and worker actors on a real Ray, with a fake model: streams, slow and closed clients, deaths of actors."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from raylm.config import Config
from raylm.engine import EngineName, as_raylm_error, engine_digest
from raylm.engine.actor import create_engine_core
from raylm.errors import ConfigError, EngineDiedError
from raylm.frontend.engines import ray_engine_client
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.ray_engine_client import (
    ActorEngineClient,
    LinkEngineClient,
    RayEngineClient,
    connect_engine,
)
from raylm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from raylm.params import SamplingParams
from tests.fakes import FakeModel, FakeWorker
from tests.frontend.engines.test_discovery import Discovery

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

CONFIG = Config()
PROMPT = list(range(1, 20))


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@dataclass
class EngineActors:
    """The actors of one engine."""

    name: str
    core: ActorHandle
    worker: ActorHandle


Start = Callable[..., EngineActors]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines, which end with the test."""
    actors: list[ActorHandle] = []

    def start_engine(
        name: str | None = None, worker_class: type = FakeWorker, config: Config = CONFIG, **fake: int
    ) -> EngineActors:
        name = name or uuid.uuid4().hex
        worker = ray.remote(worker_class).options(num_cpus=0.1).remote(**fake)
        core = create_engine_core(config, name, name, [worker], num_cpus=0.1)
        actors.extend((core, worker))
        return EngineActors(name, core, worker)

    yield start_engine
    for actor in actors:
        ray.kill(actor)


Connect = Callable[[ActorHandle], Awaitable[ActorEngineClient]]
both_ways = pytest.mark.parametrize("connect", ["link", "ray"], indirect=True)


@pytest.fixture
async def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    """Connects clients, which disconnect at the end of the test. They use a Link, or Ray calls ("ray")."""
    clients: list[ActorEngineClient] = []
    way = getattr(request, "param", "link")
    if way == "ray":
        monkeypatch.setattr(ray_engine_client, "own_node", lambda: "another node")

    async def connect_client(core: ActorHandle) -> ActorEngineClient:
        clients.append(await connect_engine(core))
        assert type(clients[-1]) is (RayEngineClient if way == "ray" else LinkEngineClient)
        return clients[-1]

    yield connect_client
    for client in clients:
        await client.close()


async def running(engine: EngineActors) -> asyncio.Future[str]:
    """Start the engine as its supervisor does. The future has the result of ``run``."""
    await engine.core.start.remote()
    return asyncio.ensure_future(engine.core.run.remote())


def request(key: int, max_tokens: int, seed: int = 3, resumable_as: str = "") -> EngineCoreRequest:
    """A request that ends only by its length."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return EngineCoreRequest(key, str(key), PROMPT, params, resumable_as=resumable_as)


async def read(
    outputs: AsyncIterator[EngineCoreOutputs], keys: set[int]
) -> tuple[dict[int, list[int]], list[EngineStats]]:
    """Tokens by key until all ``keys`` are finished, and the stats of every message."""
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    stats = []
    while keys:
        news = await anext(outputs)
        stats.append(news.stats)
        drawn = iter(news.token_ids)
        for key, count, reason in zip(news.keys, news.token_counts, news.finish_reasons, strict=True):
            tokens[key].extend(itertools.islice(drawn, count))
            if reason is not None:
                keys = keys - {key}
    return tokens, stats


@both_ways
async def test_two_clients_get_their_own_tokens(start: Start, connect: Connect) -> None:
    engine = start()
    await running(engine)
    clients = [await connect(engine.core) for _ in range(2)]
    for client, seed in zip(clients, (3, 4), strict=True):
        for key in (1, 2):
            client.add(request(key, 20 + key, seed))
    for client, seed in zip(clients, (3, 4), strict=True):
        tokens, _ = await read(client.outputs(), {1, 2})
        assert tokens == {key: FakeModel().continuation(PROMPT, seed, 20 + key) for key in (1, 2)}


@both_ways
async def test_a_client_that_does_not_read_stalls_nobody_and_loses_nothing(start: Start, connect: Connect) -> None:
    engine = start()
    await running(engine)
    slow, fast = [await connect(engine.core) for _ in range(2)]
    slow.add(request(1, 200))
    fast.add(request(1, 220))
    tokens, messages = await read(fast.outputs(), {1})
    assert len(tokens[1]) == 220
    assert len(messages) > 50
    tokens, messages = await read(slow.outputs(), {1})
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 200)
    assert len(messages) <= 60


@both_ways
async def test_closing_a_client_ends_its_requests_alone(start: Start, connect: Connect) -> None:
    engine = start(max_model_len=4000, num_blocks=600)
    await running(engine)
    leaver, stayer = [await connect(engine.core) for _ in range(2)]
    leaver.add(request(1, 3900))
    await anext(leaver.outputs())
    await leaver.close()
    stayer.add(request(1, 100))
    tokens, stats = await read(stayer.outputs(), {1})
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 100)
    assert stats[-2].running == 1
    assert stats[-1].running == 0


class SlowWorker(FakeWorker):
    """A worker whose steps take 20 ms."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Sleep, then run the step."""
        time.sleep(0.02)
        return super().execute(plan)


async def slow_answer(
    start: Start, connect: Connect
) -> tuple[EngineActors, ActorEngineClient, AsyncIterator[EngineCoreOutputs]]:
    """An engine, its client, and the client's outputs after the first tokens of request 1, which has 3900 tokens."""
    engine = start(worker_class=SlowWorker, max_model_len=4000, num_blocks=600)
    await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 3900))
    outputs = client.outputs()
    while not (await anext(outputs)).keys:
        pass
    return engine, client, outputs


async def test_the_end_of_a_link_ends_what_its_client_had_open(start: Start, connect: Connect) -> None:
    engine, client, _ = await slow_answer(start, connect)
    assert isinstance(client, LinkEngineClient)
    client._link.close()
    async with asyncio.timeout(300):
        while (await engine.core.load.remote()).held:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_engine_that_cannot_be_linked_to_is_reached_over_ray(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    await running(engine)
    _, path = (await engine.core.info.remote()).link
    os.remove(path)
    client = await connect_engine(engine.core)
    assert isinstance(client, RayEngineClient)
    client.add(request(1, 20))
    tokens, _ = await read(client.outputs(), {1})
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 20)
    assert "outputs come through Ray: " in caplog.text
    await client.close()


@both_ways
async def test_an_engine_that_is_stopped_is_lost(start: Start, connect: Connect) -> None:
    """The client notices the silence. Ray would report another reason, after a minute or later."""
    engine, client, outputs = await slow_answer(start, connect)
    pid = await engine.core.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(300):
            with pytest.raises(EngineDiedError) as caught:
                await read(outputs, {1})
            with pytest.raises(EngineDiedError):
                await client.take_parked(request(1, 5))
    finally:
        os.kill(pid, signal.SIGKILL)
    assert "has given no sign of life for 3 s" in str(caught.value.__cause__)
    assert not client.dropped


@pytest.mark.parametrize("connect", ["ray"], indirect=True)
async def test_an_engine_that_does_not_acknowledge_a_request_is_lost(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "SILENCE_S", 2)  # less than the engine waits for this client
    engine = start()
    await running(engine)
    client = await connect(engine.core)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    client._core = SimpleNamespace(submit=SimpleNamespace(remote=never))
    client.add(request(1, 5))
    async with asyncio.timeout(300):
        with pytest.raises(EngineDiedError) as caught:
            await read(client.outputs(), {1})
    assert "has given no sign of life for 2 s" in str(caught.value.__cause__)


async def test_an_engine_that_opens_no_stream_has_a_limit_in_time(start: Start) -> None:
    engine = start()
    await running(engine)
    info = await engine.core.info.remote()
    pid = await engine.core.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):  # less than Ray's own time limit
            with pytest.raises(TimeoutError) as caught:
                await RayEngineClient.connect(engine.core, info)
        assert "ray_engine_client" in str(caught.traceback[-2].path), "the client's own time limit"
    finally:
        os.kill(pid, signal.SIGCONT)
    client = await RayEngineClient.connect(engine.core, info)
    client.add(request(1, 5))
    tokens, _ = await read(client.outputs(), {1})
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 5)
    await client.close()


@both_ways
async def test_an_idle_engine_and_an_idle_client_keep_each_other(start: Start, connect: Connect) -> None:
    engine = start()
    await running(engine)
    client = await connect(engine.core)
    await asyncio.sleep(5)
    client.add(request(1, 5))
    tokens, _ = await read(client.outputs(), {1})
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 5)


@both_ways
async def test_the_death_of_the_worker_ends_the_engine_and_every_stream(start: Start, connect: Connect) -> None:
    engine = start(max_model_len=4000, num_blocks=600)
    run = await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 3900))
    outputs = client.outputs()
    await anext(outputs)
    ray.kill(engine.worker)
    assert (await run).endswith(" was lost.")
    with pytest.raises(EngineDiedError):
        await read(outputs, {1})


@both_ways
async def test_the_death_of_the_engine_core_ends_its_streams_and_raises_nowhere_else(
    start: Start, connect: Connect
) -> None:
    engine = start()
    await running(engine)
    client = await connect(engine.core)
    ray.kill(engine.core)
    with pytest.raises(EngineDiedError):
        await read(client.outputs(), {1})
    client.add(request(1, 5))
    client.abort([1])
    await client.close()


class Caller:
    """A client in another process."""

    async def call(self, core: ActorHandle) -> int:
        """Send a request that takes a minute. Returns the process id after the first token."""
        self._client = await connect_engine(core)
        self._client.add(request(1, 3900, resumable_as="a stream"))
        outputs = self._client.outputs()
        while not (await anext(outputs)).keys:
            pass
        return os.getpid()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_a_client_had_open_is_parked_at_its_end_and_nobody_else_s_is(
    start: Start, connect: Connect, number: int
) -> None:
    engine = start(worker_class=SlowWorker, max_model_len=4000, num_blocks=600)
    await running(engine)
    stayer = await connect(engine.core)
    caller = ray.remote(Caller).options(num_cpus=0.1).remote()
    pid = await caller.call.remote(engine.core)
    assert (await engine.core.load.remote()).held == 1
    stayer.add(request(1, 250))
    os.kill(pid, number)
    try:
        async with asyncio.timeout(300):
            tokens, _ = await read(stayer.outputs(), {1})
            while (await engine.core.load.remote()).held:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert tokens[1] == FakeModel().continuation(PROMPT, 3, 250)
    named = request(7, 3900, resumable_as="a stream")
    parked = await stayer.take_parked(named)
    assert parked is not None
    (drawn,) = parked.token_ids
    assert drawn
    assert drawn == FakeModel().continuation(PROMPT, 3, len(drawn))
    assert await stayer.take_parked(named) is None, "the parked answer was already taken"
    stayer.add(replace(named, drawn=(tuple(drawn),)))
    outputs = stayer.outputs()
    while not (news := await anext(outputs)).keys:
        pass
    assert news.token_ids == FakeModel().continuation(PROMPT, 3, len(drawn) + len(news.token_ids))[len(drawn) :]


@both_ways
async def test_an_engine_that_drains_says_so_to_its_clients_and_to_those_who_come(
    start: Start, connect: Connect
) -> None:
    engine = start(worker_class=SlowWorker)
    await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 200))
    outputs = client.outputs()
    while not (await anext(outputs)).keys:
        pass
    drained = asyncio.ensure_future(engine.core.drain.remote())
    async with asyncio.timeout(300):
        while not (await anext(outputs)).draining:
            pass
        late = await connect(engine.core)
        assert (await anext(late.outputs())).draining
        await client.close()
        await asyncio.sleep(0.2)
        assert not drained.done(), "a client is still connected and may send requests"
        await late.close()
        await drained


class FailingWorker(FakeWorker):
    """A worker whose first step fails."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Fail."""
        raise RuntimeError("out of everything")


@both_ways
async def test_a_step_that_fails_ends_the_engine_and_says_why(start: Start, connect: Connect) -> None:
    engine = start(worker_class=FailingWorker)
    run = await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 5))
    assert await run == "RuntimeError: out of everything"
    with pytest.raises(EngineDiedError):
        await read(client.outputs(), {1})


class HangingWorker(FakeWorker):
    """A worker whose first step never ends."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Block."""
        time.sleep(600)
        raise AssertionError


async def test_a_worker_that_hangs_in_a_step_is_lost(start: Start, connect: Connect) -> None:
    engine = start(worker_class=HangingWorker, config=Config.model_validate({"engine": {"step_timeout_s": 0.5}}))
    run = await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 5))
    async with asyncio.timeout(300):
        assert await run == "A step has taken longer than engine.step_timeout_s, 0.5 s."
        with pytest.raises(EngineDiedError):
            await read(client.outputs(), {1})


class UnservableWorker(FakeWorker):
    """A worker that rejects its configuration."""

    def start(self) -> WorkerInfo:
        """Raise ConfigError."""
        raise ConfigError("max_model_len: 7 is too evil.")


async def test_what_a_worker_refuses_at_start_arrives_as_it_was_said(start: Start) -> None:
    engine = start(worker_class=UnservableWorker)
    with pytest.raises(RayError) as caught:
        await engine.core.start.remote()
    error = as_raylm_error(caught.value)
    assert type(error) is ConfigError
    assert error.message == "max_model_len: 7 is too evil."


async def test_discovery_finds_every_incarnation_once_and_no_engine_of_another_application(start: Start) -> None:
    digest = engine_digest(CONFIG)
    found: asyncio.Queue[EngineClient] = asyncio.Queue()
    discovery = Discovery("app", digest, found.put_nowait)
    first = start(str(EngineName("app", digest, "a.0")))
    await running(start(str(EngineName("another", digest, "b.0"))))
    await running(first)
    async with asyncio.timeout(300):
        assert (await found.get()).info.engine_id == first.name
        ray.kill(first.core)
        second = start(str(EngineName("app", digest, "a.1")))
        await running(second)
        client = await found.get()
        assert client.info.engine_id == second.name
    await discovery.looked(3)
    await client.close()
    assert found.empty()
    discovery.stop()


async def test_a_line_that_an_engine_cannot_read_is_given_up_and_opened_again(start: Start) -> None:
    digest = engine_digest(CONFIG)
    found: asyncio.Queue[EngineClient] = asyncio.Queue()
    discovery = Discovery("app", digest, found.put_nowait)
    await running(start(str(EngineName("app", digest, "a.0"))))
    async with asyncio.timeout(300):
        client = await found.get()
        client.add("no request")  # type: ignore[arg-type]
        with pytest.raises(EngineDiedError):
            await read(client.outputs(), {1})
        await client.close()
        again = await found.get()
        again.add(request(1, 5))
        await read(again.outputs(), {1})
    again.draining = True
    await again.close()
    await discovery.looked(8)
    assert found.empty(), "a draining engine must not be found again"
    discovery.stop()


@both_ways
async def test_a_client_that_is_silent_is_given_up_and_hears_that_the_engine_lives(
    start: Start, connect: Connect
) -> None:
    engine = start(worker_class=SlowWorker, max_model_len=4000, num_blocks=600)
    await running(engine)
    client = await connect(engine.core)
    client.add(request(1, 5))
    outputs = client.outputs()
    async with asyncio.timeout(300):
        await read(outputs, {1})
        if isinstance(client, LinkEngineClient):
            client._link._silence.stop()
        else:
            client._tasks[1].cancel()  # the task that sends batches
        with pytest.raises(EngineDiedError):
            await read(outputs, {2})
    assert client.dropped

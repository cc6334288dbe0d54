"""EngineCore with a fake executor: clients, two steps in flight, and idleness."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from raylm.config import Config, EngineConfig
from raylm.engine import EngineCore
from raylm.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineUnavailableError,
)
from raylm.messages import ModelRunnerOutput, SchedulerOutput, ServiceLevel
from tests.engine.build import request
from tests.engine.running_core import answers, collect, config, running, some, until
from tests.fakes import FakeExecutor, FakeWorker


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_each_stage_has_a_step(steps_in_flight: int) -> None:
    """Each stage has a step at once, and with two steps in flight for one worker there is one step more."""
    executor = FakeExecutor(FakeWorker(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64), 0.0005)
    settings = config(steps_in_flight).model_copy(update={"engine": EngineConfig(pipeline_parallel_size=3)})
    async with running(executor, settings) as core:
        outbox, batch = core.connect("a"), some()
        core.add("a", batch)
        assert await collect(outbox, sum(one.params.n for one in batch)) == answers(batch)
    assert executor.most_in_flight == steps_in_flight + 2


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("delay_s", [0.0, 0.0005])
async def test_every_client_gets_its_tokens(steps_in_flight: int, delay_s: float) -> None:
    executor = FakeExecutor(FakeWorker(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=64), delay_s)
    async with running(executor, config(steps_in_flight)) as core:
        outboxes = {client_id: core.connect(client_id) for client_id in "ab"}
        requests = {"a": some(), "b": some(9, seed=99)}
        for client_id, batch in requests.items():
            core.add(client_id, batch)
        for client_id, outbox in outboxes.items():
            batch = requests[client_id]
            assert await collect(outbox, sum(one.params.n for one in batch)) == answers(batch)
        assert core.scheduler.counters.preemptions > 0
    assert executor.most_in_flight == steps_in_flight
    assert executor.shut_down


async def test_a_core_that_was_idle_goes_on() -> None:
    async with running(FakeExecutor()) as core:
        outbox = core.connect("a")
        for _ in range(3):
            core.add("a", some(1))
            assert await collect(outbox, 1) == answers(some(1))
            await asyncio.sleep(0.002)


async def test_the_first_message_is_there_at_once_and_empty() -> None:
    async with running(FakeExecutor()) as core:
        out = await core.connect("a").get()
        assert (out.keys, out.errors) == ([], [])


async def test_a_slow_client_stalls_nobody() -> None:
    async with running(FakeExecutor()) as core:
        slow, quick = core.connect("slow"), core.connect("quick")
        core.add("slow", some(2))
        core.add("quick", some(2))
        assert await collect(quick, 3) == answers(some(2))
        await until(lambda: not core.scheduler.has_work)
        out = await slow.get()
        assert len(out.token_ids) == 3 * 30, "all in one message"
        assert out.stats.running == 0


async def test_an_executor_that_is_always_ready_does_not_starve_the_loop() -> None:
    class Ready(FakeExecutor):
        def execute(self, plan: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
            done = asyncio.get_running_loop().create_future()
            done.set_result(self.worker.execute(plan))
            return done

    async with running(Ready(FakeWorker(max_model_len=1000, num_blocks=70, max_num_batched_tokens=64))) as core:
        outbox = core.connect("a")
        core.add("a", [request([1], max_tokens=900, ignore_eos=True)])
        await outbox.get()
        assert len((await outbox.get()).token_ids) < 100
        core.abort("a", [0])


async def test_a_request_that_cannot_be_served_gets_an_error_and_others_go_on() -> None:
    async with running(FakeExecutor(), config(max_model_len=20)) as core:
        outbox = core.connect("a")
        await outbox.get()
        core.add("a", [request([1] * 20, 7), request([1] * 5, 8, max_tokens=2, ignore_eos=True)])
        out = await outbox.get()
        assert [key for key, _ in out.errors] == [7]
        assert isinstance(out.errors[0][1], ContextLengthError)
        assert "20 tokens" in out.errors[0][1].message
        assert len((await collect(outbox, 1))[8, 0]) == 2


async def test_abort_tells_how_busy_the_engine_is() -> None:
    core = EngineCore(config(), FakeExecutor())
    await core.start()
    outbox = core.connect("a")
    core.add("a", some(2))
    await core.step()
    assert (await outbox.get()).stats.running == 2
    core.abort("a", [0, 55])
    assert (await outbox.get()).stats.running == 1
    core.abort("a", [1])
    assert (await outbox.get()).stats.kv_usage == 0


async def test_an_idle_engine_tells_everybody_that_it_is() -> None:
    async with running(FakeExecutor(delay_s=0.0005)) as core:
        first, last = core.connect("first"), core.connect("last")
        core.add("first", some(1, max_tokens=2))
        core.add("last", some(1))
        await collect(first, 1)
        await collect(last, 1)
        async with asyncio.timeout(300):
            out = await first.get()
        assert (out.keys, out.stats.running, out.stats.kv_usage) == ([], 0, 0.0)


async def test_a_request_given_up_before_its_first_step_is_no_work() -> None:
    async with running(FakeExecutor()) as core:
        outbox = core.connect("a")
        await asyncio.sleep(0.002)
        core.add("a", some(1))
        core.abort("a", [0])
        await asyncio.sleep(0.002)
        core.add("a", some(1))
        assert await collect(outbox, 1) == answers(some(1))


async def test_a_client_that_leaves_takes_its_requests_along() -> None:
    async with running(FakeExecutor(delay_s=0.0005)) as core:
        gone, stays = core.connect("gone"), core.connect("stays")
        core.add("gone", some(5))
        core.add("stays", some(5))
        await gone.get()
        core.drop_client("gone")
        core.drop_client("gone")
        core.add("gone", some(5))
        assert {client_id for client_id, _ in core.scheduler.open_requests()} == {"stays"}
        assert await collect(stays, 7) == answers(some(5))
        with pytest.raises(EngineUnavailableError):
            await collect(gone, sequences=99)


async def test_many_requests_of_a_client_that_leaves_end_beside_the_steps() -> None:
    async with running(FakeExecutor(delay_s=0.0005)) as core:
        core.connect("gone")
        stays = core.connect("stays")
        core.add("gone", [request([1], key) for key in range(1000)])
        core.add("stays", some(5))
        core.drop_client("gone")
        assert 600 < len(core.scheduler.open_requests("gone")) < 1000
        assert await collect(stays, 7) == answers(some(5))


async def test_and_at_once_if_it_comes_again() -> None:
    async with running(FakeExecutor(delay_s=0.0005)) as core:
        core.connect("a")
        core.add("a", [request([1], key) for key in range(1000)])
        outbox = core.connect("a")
        assert not core.scheduler.open_requests("a")
        core.add("a", some(5))
        assert await collect(outbox, 7) == answers(some(5))


async def test_a_client_that_connects_again_starts_anew() -> None:
    async with running(FakeExecutor(delay_s=0.0005)) as core:
        old = core.connect("a")
        core.add("a", some(3))
        new = core.connect("a")
        core.drop_client("a", old)  # the old stream's end is noticed late
        core.add("a", some(2))
        assert await collect(new, 3) == answers(some(2))


async def test_what_is_discovered_is_cut_to_what_fits() -> None:
    async def longest(settings: Config, worker: FakeWorker) -> int:
        core = EngineCore(settings, FakeExecutor(worker))
        return (await core.start()).max_model_len

    assert await longest(config(), FakeWorker(max_model_len=100)) == 100
    assert await longest(config(max_model_len=50), FakeWorker(max_model_len=100)) == 50
    assert await longest(config(max_model_len=50), FakeWorker(num_blocks=2, max_model_len=100)) == 32


# -------------------------------------------------------------------- death


async def test_a_request_whose_client_has_hung_up_is_told_so_and_not_computed() -> None:
    executor = FakeExecutor()
    async with running(executor) as core:
        outbox = core.connect("a")
        one = replace(request([1] * 20, 3, max_tokens=4), service=ServiceLevel(timeout_s=5.0))  # it arrived in 1970
        core.add("a", [one])
        while not (out := await outbox.get()).errors:
            pass
        ((key, error),) = out.errors
        assert (key, type(error)) == (3, DeadlineExceededError)
    assert executor.worker.tokens_computed == 0


@pytest.mark.parametrize("ahead_s", [-3600.0, -11.0, 0.0, 11.0, 3600.0])
async def test_a_time_limit_is_by_the_clock_of_the_client_that_set_it(ahead_s: float) -> None:
    """The engine's clock is ``ahead_s`` ahead of the client's.

    The requests waited 1 s and 11 s of their limit of 10 s.
    """
    async with running(FakeExecutor()) as core:
        outbox, now = core.connect("a"), time.time() - ahead_s
        for key, waited_s in enumerate([1.0, 11.0]):
            one = replace(request([1] * 20, key, max_tokens=1), service=ServiceLevel(timeout_s=10.0))
            core.add("a", [replace(one, arrival_time=now - waited_s)], now)
        drawn, errors = set(), {}
        while not (drawn and errors):
            out = await outbox.get()
            drawn |= set(out.keys)
            errors |= dict(out.errors)
    assert drawn == {0}
    assert {key: type(error) for key, error in errors.items()} == {1: DeadlineExceededError}


async def test_a_clock_that_is_set_back_keeps_no_news_from_a_client_that_watches() -> None:
    now = 1_000_000.0
    core = EngineCore(config(), FakeExecutor(FakeWorker(40)), lambda: now)
    await core.start()
    core.connect("a")
    outbox = core.connect("b")
    core.watch_blocks("b")
    await outbox.get()
    now -= 3600
    core.add("a", [request([1] * 5)])
    async with asyncio.timeout(60):
        assert (await outbox.get()).stats.waiting == 1
    await core.shutdown()

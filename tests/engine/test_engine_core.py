"""EngineCore over a fake executor: clients, two steps in flight, idleness, and every way to die."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from raylm.config import CacheConfig, Config, SchedulerConfig
from raylm.engine import EngineCore, LocalExecutor
from raylm.engine.model_executor import ModelExecutor
from raylm.engine.outbox import Outbox
from raylm.engine.sequence import sequence_seed
from raylm.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDiedError,
    EngineUnavailableError,
)
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, ServiceLevel, WorkerInfo
from tests.engine.build import request
from tests.engine.integrity import check_kv
from tests.fakes import FakeExecutor, FakeModel, FakeWorker

Tokens = dict[tuple[int, int], list[int]]


def config(steps_in_flight: Any = 2, max_model_len: int | None = None, num_blocks: int = 40) -> Config:
    return Config(
        max_model_len=max_model_len,
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, steps_in_flight=steps_in_flight),
    )


@asynccontextmanager
async def running(executor: ModelExecutor, settings: Config | None = None) -> AsyncIterator[EngineCore]:
    """A started core that runs in the background; afterwards it must be idle and whole."""
    core = EngineCore(settings or config(), executor)
    await core.start()
    run = asyncio.create_task(core.run())
    try:
        yield core
        await until(lambda: not core.scheduler.has_work and not core._in_flight)
        check_kv(core.scheduler.kv)
        core.scheduler.kv.check_idle()
    finally:
        run.cancel()
        with suppress(asyncio.CancelledError, EngineDiedError):
            await run
        await core.shutdown()


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


async def collect(outbox: Outbox, sequences: int) -> Tokens:
    """Everything until so many sequences have ended."""
    tokens: Tokens = defaultdict(list)
    while sequences:
        out = await outbox.get()
        assert not out.errors
        start = 0
        for key, index, count in zip(out.keys, out.indexes, out.token_counts, strict=True):
            tokens[key, index] += out.token_ids[start : start + count]
            start += count
        sequences -= sum(reason is not None for reason in out.finish_reasons)
    return tokens


def answers(requests: list[EngineCoreRequest]) -> Tokens:
    """What requests with ignore_eos and max_tokens must get."""
    return {
        (one.key, index): FakeModel().continuation(
            one.prompt_token_ids, sequence_seed(one.params.seed or 0, index), one.params.max_tokens or 0
        )
        for one in requests
        for index in range(one.params.n)
    }


def some(count: int = 12, **params: Any) -> list[EngineCoreRequest]:
    return [
        request([1 + key % 3] * (5 + 5 * key), key, **{"max_tokens": 30, "ignore_eos": True, "n": 1 + key % 2} | params)
        for key in range(count)
    ]


# -------------------------------------------------------------------- life


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
        core.drop_client("a", old)  # the end of the old stream, noticed late
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


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_every_client_learns_of_the_death(steps_in_flight: int) -> None:
    core = EngineCore(config(steps_in_flight), FakeExecutor(delay_s=0.0001, die_at_step=6))
    await core.start()
    outboxes = {client_id: core.connect(client_id) for client_id in "ab"}
    for client_id in outboxes:
        core.add(client_id, some(12))
    with pytest.raises(EngineDiedError, match="worker is gone"):
        await core.run()
    for outbox in outboxes.values():
        assert not (await outbox.get()).errors
        with pytest.raises(EngineDiedError):
            await outbox.get()
    with pytest.raises(EngineDiedError):
        core.add("a", some(1))
    with pytest.raises(EngineDiedError):
        core.connect("c")
    await core.shutdown()


@pytest.mark.parametrize("busy", [False, True])
async def test_the_loss_of_a_worker_ends_the_run_with_its_reason(busy: bool) -> None:
    executor = FakeExecutor(delay_s=0.001)
    core = EngineCore(config(), executor)
    await core.start()
    outbox = core.connect("a")
    run = asyncio.create_task(core.run())
    await outbox.get()
    if busy:
        core.add("a", [request([1, 2], max_tokens=100, ignore_eos=True)])
        await outbox.get()
        executor.die()
    executor.on_lost(EngineDiedError("The worker has given no sign of life for 3 s."))
    executor.on_lost(EngineDiedError("The worker of rank 1 was lost."))
    async with asyncio.timeout(300):
        with pytest.raises(EngineDiedError, match="no sign of life for 3 s"):
            await run
    with pytest.raises(EngineDiedError, match="no sign of life for 3 s"):
        await collect(outbox, 1)


async def test_the_loss_of_a_worker_while_it_starts_is_the_reason_too() -> None:
    class Lost(FakeExecutor):
        async def start(self) -> WorkerInfo:
            self.on_lost(EngineDiedError("The worker was lost."))
            raise EngineDiedError("A process of the engine was lost.")

    with pytest.raises(EngineDiedError, match=r"The worker was lost\."):
        await EngineCore(config(), Lost()).start()


async def test_a_request_that_cannot_be_taken_in_ends_alone() -> None:
    async with running(FakeExecutor()) as core:
        outbox = core.connect("c")
        bad, good = (request([key, 2], key, max_tokens=3, ignore_eos=True) for key in (1, 2))
        core.add("c", [replace(bad, params=replace(bad.params, ignore_eos=False), eos_token_ids=[7]), good])
        errors, ended = [], []
        while not ended:
            news = await outbox.get()
            errors += news.errors
            ended += [key for key, reason in zip(news.keys, news.finish_reasons, strict=True) if reason]
        assert [(key, "cannot add this request: TypeError" in error.message) for key, error in errors] == [(1, True)]
        assert ended == [2]


async def test_a_fault_of_the_core_itself_is_a_death_too(monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(config(), FakeExecutor())
    await core.start()
    outbox = core.connect("a")
    core.add("a", some(1))
    monkeypatch.setattr(core.scheduler, "update", lambda plan, result: 1 / 0)
    assert core.held_requests == 1
    with pytest.raises(EngineDiedError, match="ZeroDivisionError"):
        await core.run()
    assert (await outbox.get()).keys == []
    with pytest.raises(EngineDiedError):
        await outbox.get()
    core.drop_client("a", outbox)  # as a client does that hears of it
    assert core.held_requests == 1


class Stuck(FakeExecutor):
    """The first step fails, the second one fails too or never ends."""

    def __init__(self, second_ends: bool) -> None:
        super().__init__()
        self.results: list[asyncio.Future[ModelRunnerOutput]] = []
        self.second_ends = second_ends

    def execute(self, plan: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        self.results.append(asyncio.get_running_loop().create_future())
        if len(self.results) == 2:
            for result in self.results[: 1 + self.second_ends]:
                result.set_exception(EngineDiedError("gone"))
        return self.results[-1]


@pytest.mark.parametrize("second_ends", [True, False])
async def test_steps_in_flight_are_let_go_of_at_death(second_ends: bool) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    executor = Stuck(second_ends)
    core = EngineCore(config(), executor)
    await core.start()
    core.connect("a")
    core.add("a", some(1))
    with pytest.raises(EngineDiedError, match="gone"):
        await core.run()
    await asyncio.sleep(0)
    assert executor.results[1].cancelled() != second_ends
    executor.results.clear()
    del core
    gc.collect()
    assert complaints == [], "an exception that nobody retrieved"


async def test_a_lost_block_is_noticed_when_the_engine_is_idle() -> None:
    core = EngineCore(config(), FakeExecutor())
    await core.start()
    core.scheduler.kv.pool.allocate(1)
    with pytest.raises(EngineDiedError, match="1 KV blocks are held by no sequence"):
        async with asyncio.timeout(300):
            await core.run()


async def test_an_engine_that_cannot_go_on_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(config(), FakeExecutor())
    await core.start()
    core.connect("a")
    core.add("a", some(1))
    monkeypatch.setattr(core.scheduler.kv, "admit", lambda *args, **kwargs: None)
    with pytest.raises(EngineDiedError, match="nothing can be scheduled"):
        await core.run()


LIMITED = Config.model_validate({"engine": {"step_timeout_s": 0.2}})


async def test_a_step_has_its_time_for_itself_and_not_with_the_one_before_it() -> None:
    limited = Config.model_validate({"engine": {"step_timeout_s": 1.0}})
    async with running(FakeExecutor(delay_s=0.6), limited) as core:  # two in flight take longer than the limit
        outbox = core.connect("a")
        core.add("a", some(1, max_tokens=4))
        assert await collect(outbox, 1)


async def test_the_time_in_which_the_whole_node_was_stopped_is_not_counted() -> None:
    class Stopped(FakeExecutor):
        def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
            return super().execute(plan) if plan.step != 3 else asyncio.ensure_future(self._stop(super().execute(plan)))

        async def _stop(self, output: Awaitable[ModelRunnerOutput]) -> ModelRunnerOutput:
            await asyncio.sleep(0.1)  # in which the core begins to wait for this step
            time.sleep(2)  # noqa: ASYNC251 - the event loop stands still, as if its process had been stopped
            await asyncio.sleep(0.01)  # in which the worker ends the step
            return await output

    limited = Config.model_validate({"engine": {"step_timeout_s": 1.0}})
    async with running(Stopped(), limited) as core:
        outbox, requests = core.connect("a"), some(1, max_tokens=6)
        core.add("a", requests)
        assert await collect(outbox, 1) == answers(requests)


async def test_a_worker_that_hangs_in_a_step_is_given_up() -> None:
    class Hanging(FakeExecutor):
        def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
            return super().execute(plan) if plan.step < 3 else asyncio.get_running_loop().create_future()

    core = EngineCore(LIMITED, Hanging())
    await core.start()
    outbox = core.connect("a")
    core.add("a", some(1))
    with pytest.raises(EngineDiedError, match=r"longer than engine\.step_timeout_s, 0\.2 s"):
        await core.run()
    with pytest.raises(EngineDiedError):
        await collect(outbox, 1)
    await core.shutdown()


# -------------------------------------------------------------------- LocalExecutor


async def test_the_local_executor_runs_a_worker_on_one_thread() -> None:
    threads = set()

    class Watched(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            threads.add(threading.current_thread().name)
            return super().execute(plan)

    async with running(LocalExecutor(config(), Watched.from_config)) as core:
        outbox = core.connect("a")
        core.add("a", some())
        assert await collect(outbox, 18) == answers(some())
    assert len(threads) == 1
    assert "raylm-worker" in threads.pop()
    assert not [thread for thread in threading.enumerate() if "raylm-worker" in thread.name]


@pytest.mark.parametrize("says_when", [True, False])
async def test_a_result_is_told_when_the_next_step_computes(says_when: bool) -> None:
    """Where that step was handed over already, and steps say when they compute; else at once."""
    begins, goes_on, told = threading.Event(), threading.Event(), threading.Event()

    class Slow(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            assert begins.wait(300)
            if plan.step == 2:
                time.sleep(0.05)
                assert told.is_set() is not says_when
            if says_when:
                self.when_computing()  # type: ignore[attr-defined]
            if plan.step == 2:
                assert goes_on.wait(300)
            return super().execute(plan)

    executor = LocalExecutor(config(), Slow.from_config)
    core = EngineCore(config(), executor)
    await core.start()
    core.connect("a")
    core.add("a", some(1))
    plans = [plan for plan in (core.scheduler.schedule(), core.scheduler.schedule()) if plan is not None]
    first, last = (asyncio.ensure_future(executor.execute(plan)) for plan in plans)
    first.add_done_callback(lambda _: told.set())
    begins.set()
    async with asyncio.timeout(300):
        assert (await first).step == 1
        assert not last.done()
        goes_on.set()
        assert (await last).step == 2
    await core.shutdown()


async def test_whatever_ends_a_step_is_told() -> None:
    class Exiting(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            raise asyncio.CancelledError("a library's own")  # no Exception

    executor = LocalExecutor(config(), Exiting.from_config)
    core = EngineCore(config(), executor)
    await core.start()
    core.connect("a")
    core.add("a", some(1))
    plan = core.scheduler.schedule()
    assert plan is not None
    async with asyncio.timeout(300):
        with pytest.raises(asyncio.CancelledError, match="own"):
            await executor.execute(plan)
    await core.shutdown()


async def test_a_worker_that_fails_is_gone_for_all_later_steps() -> None:
    class Failing(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            if plan.step == 2:
                raise MemoryError("no memory")
            return super().execute(plan)

    executor = LocalExecutor(config(), Failing.from_config)
    core = EngineCore(config(), executor)
    await core.start()
    outbox = core.connect("a")
    core.add("a", some(1))
    plans = [core.scheduler.schedule() for _ in range(2)]
    assert None not in plans
    results = [executor.execute(replace(plans[0], step=1)), executor.execute(replace(plans[1], step=2))]  # type: ignore
    results.append(executor.execute(plans[1]))  # type: ignore[arg-type]
    await results[0]
    with pytest.raises(EngineDiedError, match="MemoryError: no memory"):
        await results[1]
    with pytest.raises(EngineDiedError, match="The worker is gone"):
        await results[2]
    core.drop_client("a", outbox)
    await core.shutdown()
    await core.shutdown()


async def test_shutdown_after_a_failed_start() -> None:
    class Broken(FakeWorker):
        def start(self) -> WorkerInfo:
            raise ConfigError("no such model")

    executor = LocalExecutor(config(), Broken.from_config)
    with pytest.raises(ConfigError, match="no such model"):
        await executor.start()
    await executor.shutdown()
    await executor.shutdown()
    await LocalExecutor(config(), Broken.from_config).shutdown()


async def test_a_request_whose_client_has_hung_up_is_told_so_and_not_computed() -> None:
    executor = FakeExecutor()
    async with running(executor) as core:
        outbox = core.connect("a")
        one = replace(request([1] * 20, 3, max_tokens=4), service=ServiceLevel(timeout_s=5.0))  # it came in 1970
        core.add("a", [one])
        while not (out := await outbox.get()).errors:
            pass
        ((key, error),) = out.errors
        assert (key, type(error)) == (3, DeadlineExceededError)
    assert executor.worker.tokens_computed == 0


@pytest.mark.parametrize("ahead_s", [-3600.0, -11.0, 0.0, 11.0, 3600.0])
async def test_a_time_limit_is_by_the_clock_of_the_client_that_set_it(ahead_s: float) -> None:
    """``ahead_s`` is what the engine's clock is ahead of the client's; a second of ten, and eleven, have passed."""
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

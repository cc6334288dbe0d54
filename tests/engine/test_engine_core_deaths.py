"""EngineCore with a fake executor: every way to die, and the end of the steps in flight."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.errors import (
    ConfigError,
    EngineDiedError,
)
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from tests.engine.build import request
from tests.engine.running_core import answers, collect, config, running, some
from tests.fakes import FakeExecutor, FakeWorker


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
    core.drop_client("a", outbox)  # as a client does after it notices the death
    assert core.held_requests == 1


class Stuck(FakeExecutor):
    """The first step fails. The second step fails too, or never ends."""

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
    assert complaints == [], "an exception was never retrieved"


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
    async with running(FakeExecutor(delay_s=0.6), limited) as core:  # two steps together take longer than the limit
        outbox = core.connect("a")
        core.add("a", some(1, max_tokens=4))
        assert await collect(outbox, 1)


async def test_the_time_in_which_the_whole_node_was_stopped_is_not_counted() -> None:
    class Stopped(FakeExecutor):
        def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
            return super().execute(plan) if plan.step != 3 else asyncio.ensure_future(self._stop(super().execute(plan)))

        async def _stop(self, output: Awaitable[ModelRunnerOutput]) -> ModelRunnerOutput:
            await asyncio.sleep(0.1)  # meanwhile the core begins to wait for this step
            time.sleep(2)  # noqa: ASYNC251 - the event loop stands still, as if its process had been stopped
            await asyncio.sleep(0.01)  # meanwhile the worker ends the step
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
    """A result is reported when the next step, already handed over, says that it computes.

    Otherwise it is reported at once.
    """
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
            raise asyncio.CancelledError("a library's own")  # it is no Exception

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

"""A plan behind a long step is made when most of that step is over, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from raylm.config import Config
from raylm.engine import EngineCore
from raylm.messages import ModelRunnerOutput, NewSequence, SchedulerOutput, WorkerInfo
from raylm.simulate.executor import SimulatedExecutor
from raylm.simulate.virtual_time import run
from tests.engine.build import request

INFO = WorkerInfo(
    num_blocks=100, block_size=16, max_model_len=1000, vocab_size=100, device="simulated", dtype="none",
    attention_backend="none", threads=1, weights_bytes=0, kv_cache_bytes=0,
)  # fmt: skip


class Watched(SimulatedExecutor):
    """Steps take ``step_s``, and ``slow`` steps 10 times as long. Records each step's time and sequences."""

    def __init__(self, step_s: float, slow: frozenset[int] = frozenset()) -> None:
        super().__init__(INFO, lambda plan: step_s * (10 if plan.step in slow else 1), answer)
        self.handed_over: list[tuple[float, list[int]]] = []

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        self.handed_over.append((asyncio.get_running_loop().time(), plan.seq_ids))
        return super().execute(plan)


def answer(new: NewSequence) -> list[int]:
    return [7]


def serve(executor: Watched, late: float, tokens: int = 40) -> tuple[int, float]:
    """Send one request at 0 s and one at ``late``. Returns the second one's first step, and the total seconds."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        core = EngineCore(Config(), executor, loop.time)
        await core.start()
        core.connect("a")
        core.add("a", [request([1] * 8, 1, max_tokens=tokens, ignore_eos=True)])
        loop.call_at(late, core.add, "a", [request([2] * 8, 2, max_tokens=2, ignore_eos=True)])
        running = asyncio.create_task(core.run())
        while core.scheduler.has_work:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)
        end_s = loop.time()
        running.cancel()
        return end_s

    end_s = run(main())
    return next(step for step, (_, seq_ids) in enumerate(executor.handed_over, 1) if len(seq_ids) > 1), end_s


def test_who_comes_during_a_long_step_is_in_the_next_one() -> None:
    executor = Watched(0.1)
    assert serve(executor, late=1.05)[0] == 12  # the eleventh step runs from 1.0 s on
    assert executor.handed_over[11][0] == pytest.approx(1.075)


def test_short_steps_are_handed_over_at_once() -> None:
    executor = Watched(0.01)
    assert serve(executor, late=0.105)[0] == 13
    assert executor.handed_over[12][0] == pytest.approx(0.11)


@pytest.mark.parametrize("step_s", [0.01, 0.1])
def test_the_worker_never_waits(step_s: float) -> None:
    executor = Watched(step_s)
    _, end_s = serve(executor, late=10 * step_s)
    assert end_s == pytest.approx(executor.busy_s, abs=0.002)


def test_a_step_that_ends_early_is_followed_at_once() -> None:
    executor = Watched(0.02, slow=frozenset(range(1, 21)))
    _, end_s = serve(executor, late=1.05)
    assert end_s == pytest.approx(executor.busy_s, abs=0.002)


def test_one_step_in_flight_stays_one() -> None:
    executor = Watched(0.1)
    core = Config.model_validate({"scheduler": {"steps_in_flight": 1}})

    async def main() -> None:
        engine = EngineCore(core, executor, asyncio.get_running_loop().time)
        await engine.start()
        engine.connect("a")
        engine.add("a", [request([1] * 8, 1, max_tokens=5, ignore_eos=True)])
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(1)
        running.cancel()

    run(main())
    assert [at for at, _ in executor.handed_over] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])

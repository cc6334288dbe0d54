"""The parts of RayLM's decode steps: wall, worker, scheduler and messages, with the worker in its own actor.

    python -m benchmarks.compare.steps --model PATH [--batch 1 8 32] [--options '{"dtype": "bfloat16"}']

Prints one JSON object per batch, with the cores that other processes used meanwhile. As in serving, an EngineCore runs
in a separate actor, over RayExecutor. It decodes ``batch`` sequences, and a client takes the outputs. ``wall`` is the
time from one result to the next. ``step`` and ``forward`` are the worker's own times. ``scheduler`` is the time of
schedule and update. ``messages`` is the rest of the EngineCore's CPU time: sending plans, and receiving results and
outputs. ``profile`` has the parts of the worker's time: linear layers, attention, the rest of the forward pass as far
as the kernels measure it, and drawing tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import ray

from benchmarks.compare.engines import meter
from benchmarks.engine.overhead import Note, note_results
from raylm import Config
from raylm.engine import EngineCore
from raylm.engine.ray_executor import WORKER_THREADS, RayExecutor, WorkerActor
from raylm.errors import RayLMError
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.params import SamplingParams

T = TypeVar("T")
PROMPT_TOKENS, WARM_UP_STEPS = 128, 24
FLOAT_PARTS = ("forward_s", "step_s")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., T]) -> Callable[..., T]:

        def timed(*args: Any) -> T:
            started = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


class ProfiledWorker(WorkerActor):
    """A worker that records the parts of each step's time."""

    def start(self, port: int = 0) -> WorkerInfo:
        info = super().start(port)
        runner: Any = self._runner
        self._sampling, self._steps = Clock(), dict[int, dict[str, float]]()
        runner.sampler.sample = self._sampling.around(runner.sampler.sample)

        def seconds() -> dict[str, float]:
            return {**runner.forward.seconds(), "sampling": self._sampling.seconds}

        launch = runner.launch

        def profiled(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
            before = seconds()
            output: Callable[[], ModelRunnerOutput] = launch(plan)
            self._steps[plan.step] = {part: now - before[part] for part, now in seconds().items()}
            return output

        runner.launch = profiled
        return info

    def profile(self, steps: list[int]) -> dict[str, float]:
        """Average seconds of each part over ``steps``."""
        found = [self._steps[step] for step in steps]
        return {part: sum(step[part] for step in found) / len(found) for part in found[0]}


@ray.remote(num_cpus=0.1)
class StepBench:
    """The process of an EngineCore whose steps are measured."""

    def __init__(self, config: Config, worker: Any) -> None:
        self._worker = worker
        executor = RayExecutor([worker])
        self._notes = note_results(executor)
        self._core = EngineCore(config, executor)
        self._scheduler = Clock()

    async def start(self) -> None:
        """Start the worker, and measure the time in the scheduler."""
        await self._core.start()
        scheduler: Any = self._core.scheduler
        scheduler.schedule = self._scheduler.around(scheduler.schedule)
        scheduler.update = self._scheduler.around(scheduler.update)
        self._running = asyncio.create_task(self._core.run())

    async def run(self, batch: int, steps: int) -> dict[str, Any]:
        """Average seconds of a decode step with ``batch`` sequences."""
        outbox = self._core.connect("bench")
        taking = asyncio.create_task(_take(outbox))
        await self._decode(batch, WARM_UP_STEPS)
        spent, noted = await self._decode(batch, steps)
        self._core.drop_client("bench", outbox)
        await taking
        (started, cpu, _), (ended, cpu_ended, _) = noted[0], noted[-1]
        count = len(noted) - 1
        outputs = [output for _, _, output in noted[1:]]
        measured = {
            "wall": (ended - started) / count,
            "scheduler": spent / count,
            "messages": max(0.0, cpu_ended - cpu - spent) / count,
        }
        parts = {name.removesuffix("_s"): sum(getattr(o, name) for o in outputs) / count for name in FLOAT_PARTS}
        profile = await self._worker.profile.remote([output.step for output in outputs])
        return {**measured, **parts, "profile": profile}

    async def _decode(self, batch: int, steps: int) -> tuple[float, list[Note]]:
        """(seconds in the scheduler, notes) of the steps in which all ``batch`` sequences decode."""
        self._notes.clear()
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, seed=1)
        keys = range(batch)
        prompts = [[5 + (key * 977 + place * 31) % 997 for place in range(PROMPT_TOKENS)] for key in keys]
        self._core.add("bench", [EngineCoreRequest(key, str(key), prompts[key], params) for key in keys])
        while not self._full(batch):
            if not self._core.scheduler.has_work:
                raise RuntimeError(f"{batch} sequences never drew in one step; more --steps are needed")
            await asyncio.sleep(0.001)
        self._scheduler.seconds, first = 0.0, len(self._notes) - 1
        while self._core.scheduler.has_work:  # noqa: ASYNC110 - polled rarely while it is timed
            await asyncio.sleep(0.02)
        full = [note for note in self._notes[first:] if len(note[2].seq_ids) == batch]
        return self._scheduler.seconds, full

    def _full(self, batch: int) -> bool:
        return bool(self._notes) and len(self._notes[-1][2].seq_ids) == batch


async def _take(outbox: Any) -> None:
    """Take the outputs until the stream ends, as a client does."""
    with suppress(RayLMError):
        while True:
            await outbox.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--options", type=json.loads, default={}, help="keys of the configuration, as JSON")
    args = parser.parse_args()
    ray.init(address="local", include_dashboard=False, logging_level="error", _system_config={"worker_niceness": 0})
    config = Config.model_validate({"model": args.model, **args.options})
    worker = ray.remote(ProfiledWorker).options(num_cpus=0.1, max_concurrency=WORKER_THREADS).remote(config)
    bench = StepBench.remote(config, worker)
    ray.get(bench.start.remote())
    for batch in args.batch:
        with meter() as used:
            found = ray.get(bench.run.remote(batch, args.steps))
        print(json.dumps({"batch": batch, "others": round(used.others, 2), **found}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

"""The overhead of a step by executor: the wall time of a step minus the worker's own time.

    python -m benchmarks.engine.overhead [--steps 300] [--batch 8] [--forward-ms 25]

As in serving, an EngineCore runs in a separate actor, with a full batch of decoding sequences. The worker is either a
fake whose forward pass takes a fixed time, or the embedded model. With two steps in flight, the worker has its next
step before it has finished the current one. So the overhead is only the work that cannot overlap with the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from benchmarks.rows import Report, parser
from raylm import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.engine.model_executor import ModelExecutor
from raylm.engine.ray_executor import RayExecutor, WorkerActor, create_worker, prepare_process, worker_threads
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.params import SamplingParams
from raylm.worker import Worker

WARM_UP_STEPS = 20
PROMPT_TOKENS = 32
TARGET = 0.15

Note = tuple[float, float, ModelRunnerOutput]  # wall clock, CPU time of the process, result


def note_results(executor: ModelExecutor) -> list[Note]:
    """Record the time of each result of ``executor``. Returns the list of notes, which grows."""
    notes: list[Note] = []
    execute = executor.execute

    async def noted(result: Awaitable[ModelRunnerOutput]) -> ModelRunnerOutput:
        output = await result
        notes.append((time.perf_counter(), time.process_time(), output))
        return output

    executor.execute = lambda plan: noted(execute(plan))  # type: ignore[method-assign]
    return notes


class FixedTimeWorker(Worker):
    """Draws the token 7 for every sequence, after a sleep."""

    forward_s = 0.0

    def start(self, meeting: str = "", address: str = "") -> WorkerInfo:
        return WorkerInfo(4096, 16, 65_536, 1000, "cpu", "none", "none", 1, 0, 0)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        began = time.perf_counter()
        time.sleep(self.forward_s)
        drawn = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
        took = time.perf_counter() - began
        output = ModelRunnerOutput(plan.step, drawn, [1] * len(drawn), [7] * len(drawn), forward_s=took, step_s=took)
        return lambda: output


class FixedTimeActor(WorkerActor, FixedTimeWorker):
    """A WorkerActor with a FixedTimeWorker."""

    def __init__(self, config: Config, forward_s: float) -> None:
        super().__init__(config)
        self.forward_s = forward_s


@ray.remote(num_cpus=0.1)
class Bench:
    """The process of an EngineCore."""

    async def run(
        self, config: Config, forward_s: float | None, worker: Any, batch: int, steps: int
    ) -> tuple[float, float]:
        """Decode ``steps`` steps with ``batch`` sequences; return (wall, worker's own time) of a step in seconds."""
        executor = _executor(config, forward_s, worker)
        notes = note_results(executor)
        core = EngineCore(config, executor)
        await core.start()
        core.connect("bench")
        params = SamplingParams(temperature=0.0, max_tokens=steps + WARM_UP_STEPS + 1, ignore_eos=True, seed=1)
        prompt = list(range(5, 5 + PROMPT_TOKENS))
        core.add("bench", [EngineCoreRequest(key, str(key), [key, *prompt], params) for key in range(batch)])
        running = asyncio.create_task(core.run())
        while core.scheduler.has_work:  # noqa: ASYNC110 - polled outside of what is timed
            await asyncio.sleep(0.05)
        running.cancel()
        await core.shutdown()
        del notes[:WARM_UP_STEPS]
        wall, busy = notes[-1][0] - notes[0][0], sum(output.step_s for _, _, output in notes[1:])
        return wall / (len(notes) - 1), busy / (len(notes) - 1)


def _executor(config: Config, forward_s: float | None, worker: Any) -> ModelExecutor:
    if worker is not None:
        return RayExecutor([worker])
    prepare_process()
    if forward_s is None:
        return LocalExecutor(config)
    worker = FixedTimeWorker(config)
    worker.forward_s = forward_s
    return LocalExecutor(config, lambda _: worker)


def measure(executor: str, in_flight: int, forward_s: float | None, batch: int, steps: int) -> tuple[float, float]:
    """(wall, worker's own time) of a step in seconds."""
    config = Config.model_validate(
        {
            "scheduler": {"steps_in_flight": in_flight},
            "cache": {"num_blocks": 4096},
            "engine": {"executor": executor, "threads": 2},
        }
    )
    worker = None
    if executor == "ray" and forward_s is None:
        worker = create_worker(config, num_cpus=0.1)
    elif executor == "ray":
        actor = ray.remote(FixedTimeActor).options(num_cpus=0.1, max_concurrency=worker_threads(config))
        worker = actor.remote(config, forward_s)
    bench = Bench.remote()
    found: tuple[float, float] = ray.get(bench.run.remote(config, forward_s, worker, batch, steps))
    ray.kill(bench)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--forward-ms", type=float, default=25.0)
    args = options.parse_args()
    ray.init(address="local", include_dashboard=False, logging_level="error", _system_config={"worker_niceness": 0})
    print(f"batch {args.batch}, {args.steps} steps; the target is {TARGET:.0%} of a {args.forward_ms:g} ms forward")
    report = Report("overhead", {"step": "ms", "worker": "ms", "overhead": "ms", "of the worker's": "%"}, args.out)
    for name, forward_s in ((f"fixed {args.forward_ms:g} ms", args.forward_ms / 1000), ("embedded model", None)):
        for executor in ("ray", "local"):
            for in_flight in (2, 1):
                wall, busy = measure(executor, in_flight, forward_s, args.batch, args.steps)
                figures = {"step": 1e3 * wall, "worker": 1e3 * busy, "overhead": 1e3 * (wall - busy)}
                figures["of the worker's"] = 100 * (wall - busy) / busy
                report.add(f"{name}, {executor}, {in_flight} in flight", figures)
    ray.shutdown()


if __name__ == "__main__":
    main()

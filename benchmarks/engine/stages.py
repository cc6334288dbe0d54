"""The gain of a second stage: tokens per second of one worker on one core, and of two stages with one core each.

    python -m benchmarks.engine.stages [--shape qwen3-0.6b] [--batch 16] [--tokens 40] [--turns 5]

Both engines are loaded at the same time and decode in turns, so that other processes slow down both. Each worker is
pinned to a separate core; the single worker has the first core. Prompts of 8 tokens are not measured. Weights are
random.

"work" is the CPU time of the single worker divided by that of the busiest stage: the ratio if stages always had a step.
Unlike the other figures, it hardly depends on other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.gpu.shapes import SHAPES, make_checkpoint
from benchmarks.rows import Report, parser
from raylm import Config
from raylm.engine import EngineCore
from raylm.engine.parallel_executor import ParallelExecutor
from raylm.engine.ray_executor import RayExecutor, WorkerActor, worker_threads
from raylm.messages import EngineCoreRequest
from raylm.params import SamplingParams

PROMPT_TOKENS = 8
SETTLED = 4  # tokens of each sequence before the measurement, and after it
UNITS = {"one": "tok/s", "stages": "tok/s", "ratio": "", "work": ""}


class PinnedWorker(WorkerActor):
    """A worker on one core."""

    def __init__(self, config: Config, rank: int, core: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        super().__init__(config, rank)

    def cpu_s(self) -> float:
        """CPU time of this process so far, in seconds."""
        return time.process_time()


@ray.remote(num_cpus=0.1)
class Bench:
    """The process of an EngineCore."""

    async def start(self, config: Config, workers: list[ActorHandle]) -> list[Any]:
        """Start an engine. Returns the stages of its pipeline."""
        kind = RayExecutor if len(workers) == 1 else ParallelExecutor
        self.core = EngineCore(config, kind(workers, None, config.engine))
        info = await self.core.start()
        self.core.connect("bench")
        self.running = asyncio.create_task(self.core.run())
        self.key = 0
        return info.pipeline

    async def decode(self, batch: int, tokens: int) -> float:
        """Tokens per second while ``batch`` sequences decode."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=1)
        keys = range(self.key, self.key + batch)
        self.key += batch
        counters = self.core.scheduler.counters
        before = counters.generation_tokens
        prompts = [[5 + key % 400, *range(5, 4 + PROMPT_TOKENS)] for key in keys]
        self.core.add("bench", [EngineCoreRequest(k, str(k), p, params) for k, p in zip(keys, prompts, strict=True)])
        found = []
        for bound in (batch * SETTLED, batch * (tokens - SETTLED)):
            while counters.generation_tokens - before < bound:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            found.append((time.perf_counter(), counters.generation_tokens))
        while self.core.scheduler.has_work:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        (began, first), (ended, last) = found
        return (last - first) / (ended - began)


def start(path: Path, stages: int, batch: int) -> tuple[ActorHandle, list[ActorHandle]]:
    config = Config.model_validate(
        {
            "model": str(path),
            "device": "cpu",
            "cache": {"num_blocks": 1024},
            "scheduler": {"max_num_seqs": batch},
            "engine": {"pipeline_parallel_size": stages, "threads": 1},
        }
    )
    kind = ray.remote(PinnedWorker).options(num_cpus=0.1, max_concurrency=worker_threads(config))
    cores = sorted(os.sched_getaffinity(0))
    bench = Bench.remote()
    workers = [kind.remote(config, rank, cores[rank % len(cores)]) for rank in range(stages)]
    for number, stage in enumerate(ray.get(bench.start.remote(config, workers))):
        print(f"stage {number}: layers {stage.first} to {stage.last}, {stage.weights_bytes / 2**20:,.0f} MiB")
    return bench, workers


def decode(bench: ActorHandle, workers: list[ActorHandle], args: argparse.Namespace) -> tuple[float, float]:
    """(tokens per second, CPU seconds of the busiest worker)."""
    before = ray.get([worker.cpu_s.remote() for worker in workers])
    rate: float = ray.get(bench.decode.remote(args.batch, args.tokens))
    after = ray.get([worker.cpu_s.remote() for worker in workers])
    return rate, max(end - begin for begin, end in zip(before, after, strict=True))


def measure(args: argparse.Namespace, path: Path, report: Report) -> None:
    engines = {stages: start(path, stages, args.batch) for stages in (1, args.stages)}
    ratios = []
    for turn in range(args.turns + 1):
        order = sorted(engines, reverse=bool(turn % 2))
        found = {stages: decode(*engines[stages], args) for stages in order}
        (one, own), (several, most) = found[1], found[args.stages]
        if turn:  # the first one warms up
            ratios.append((several / one, own / most))
            report.add(f"turn {turn}", {"one": one, "stages": several, "ratio": several / one, "work": own / most})
    ratio, work = map(statistics.median, zip(*ratios, strict=True))
    report.add("median", {"ratio": ratio, "work": work})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    options.add_argument("--stages", type=int, default=2)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--tokens", type=int, default=40)
    options.add_argument("--turns", type=int, default=5)
    args = options.parse_args()
    ray.init(address="local", include_dashboard=False, logging_level="error", _system_config={"worker_niceness": 0})
    print(f"{args.shape}, batch {args.batch}, {args.stages} stages")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.shape, torch.device("cpu"))
        measure(args, Path(folder), Report("stages", UNITS, args.out))
    ray.shutdown()


if __name__ == "__main__":
    main()

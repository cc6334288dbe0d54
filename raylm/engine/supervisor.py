"""Engine: the Serve deployment whose replicas each own one engine's processes, and start new ones when one dies."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylm.config import Config
from raylm.engine.actor import create_engine_core, engine_core_prefix
from raylm.engine.load_report import PERIOD_S, LoadReport
from raylm.engine.ray_executor import answer, as_raylm_error, create_worker
from raylm.errors import EngineDiedError, RayLMError
from raylm.messages import EngineInfo
from raylm.stages import report

SUPERVISOR_CPUS = 0.1
ENGINE_CORE_CPUS = 0.1
DRAIN_MARGIN_S = 1.5
PING_PERIOD_S = 0.5
LOAD_PERIOD_S = 1.0


def placement_bundles(config: Config, gpus: int) -> list[dict[str, float]]:
    """What one engine reserves: for its supervisor, its EngineCore and each of its workers, in this order."""
    device = {"GPU": float(gpus)} if gpus else {"CPU": config.engine.num_cpus}
    core = {"CPU": ENGINE_CORE_CPUS}
    if config.engine.executor == "local":
        return [{"CPU": SUPERVISOR_CPUS}, core | device]
    return [{"CPU": SUPERVISOR_CPUS}, core, *[device] * config.engine.tensor_parallel_size]


class EngineProcesses:
    """One incarnation of an engine: its EngineCore and workers, started together as importing torch takes longest."""

    def __init__(self, config: Config, name: str, engine_id: str, gpus: int, title: str = "") -> None:
        """``title`` begins its lines at the terminal."""
        self._title = title
        self._held = 0
        _, core, *workers = map(_options, count(), placement_bundles(config, gpus))
        self._workers = [create_worker(config, rank, **options) for rank, options in enumerate(workers)]
        self._core = create_engine_core(config, name, engine_id, self._workers, **core)

    async def start(self) -> EngineInfo:
        """Wait until it is ready; a RayLMError says why it cannot serve the configuration, or that a process died."""
        return await answer(self._core.start.remote())

    async def run(self) -> str:
        """Until a fault ends it; returns what was lost, and how many requests it held."""
        ends = [asyncio.create_task(_until_dead(worker)) for worker in self._workers]
        ends.append(asyncio.ensure_future(self._core.run.remote()))
        load = asyncio.create_task(self._follow_load())
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        what = next(_what_was_lost(rank, len(self._workers), end) for rank, end in enumerate(ends) if end.done())
        for task in (*ends, load):
            task.cancel()
        with suppress(TimeoutError, RayError):  # without an EngineCore it is what it held a moment ago
            async with asyncio.timeout(PING_PERIOD_S):
                _, self._held = await self._core.load.remote()
        return f"{what} It held {self._held} open requests."

    async def _follow_load(self) -> None:
        """Report it while there is any; the end of the EngineCore ends this too."""
        load, told = LoadReport(), time.monotonic()
        with suppress(RayError):
            while True:
                await asyncio.sleep(LOAD_PERIOD_S)
                stats, self._held = await self._core.load.remote()
                if (seconds := time.monotonic() - told) < PERIOD_S:
                    continue
                told += seconds
                if line := load.line(stats, seconds):
                    report("stage", "load", f"{self._title}: {line}")

    async def drain(self, limit_s: float) -> None:
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(limit_s):
                await self._core.drained.remote()

    def kill(self) -> None:
        """Safe when the processes are gone already."""
        for actor in (self._core, *self._workers):
            ray.kill(actor)


def _what_was_lost(rank: int, workers: int, end: asyncio.Future[str]) -> str:
    """In words; ``end`` is that of the worker ``rank``, or behind all workers of the EngineCore's run."""
    try:
        return end.result()
    except RayActorError:
        if rank == workers:
            return "The EngineCore was lost."
        return "The worker was lost." if workers == 1 else f"The worker of rank {rank} was lost."
    except RayError as error:
        return as_raylm_error(error).message


async def _until_dead(worker: ActorHandle) -> str:
    """Ping a worker again and again: the death of one without work would not be noticed otherwise."""
    while True:
        await worker.ping.remote()
        await asyncio.sleep(PING_PERIOD_S)


def _options(index: int, bundle: dict[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that takes a whole bundle of the supervisor's placement group."""
    strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=index)
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}


class Engine:
    """Starts one engine and replaces it when a process of it dies; Serve owns the placement group."""

    async def __init__(self, config: Config, gpus: int) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._config = config
        self._gpus = gpus
        self._prefix = engine_core_prefix(context.app_name, config)
        self._app_name = context.app_name
        self._replica = context.replica_tag
        self._incarnation = 0
        self._watch: asyncio.Task[None] | None = None
        self._processes, info = await self._launch()
        _report(info, self._title)
        self._watch = asyncio.create_task(self._keep_alive())

    @property
    def _title(self) -> str:
        return f"{self._app_name}/{self._replica}.{self._incarnation}"

    async def _launch(self) -> tuple[EngineProcesses, EngineInfo]:
        """Start the next incarnation; a start that fails leaves nothing behind."""
        engine_id = f"{self._replica}.{self._incarnation}"
        processes = EngineProcesses(self._config, self._prefix + engine_id, engine_id, self._gpus, self._title)
        try:
            info = await processes.start()
        except RayLMError as error:
            processes.kill()
            report("error", "engine", f"{self._title}: {error.message}")
            raise
        return processes, info

    async def _keep_alive(self) -> None:
        """Replace the engine whenever it ends, until a start fails."""
        while True:
            reason = await self._processes.run()
            lost = time.monotonic()
            report("stage", "lost", f"{self._title}: {reason} A new engine is started.")
            self._processes.kill()
            self._incarnation += 1
            self._processes, _ = await self._launch()
            report("stage", "engine", f"{self._title} is ready after {time.monotonic() - lost:.1f} s")

    async def check_health(self) -> None:
        """Serve calls this; an error, that the engine could not be started again here, replaces the whole replica."""
        if self._watch is not None and self._watch.done():
            raise EngineDiedError(f"The engine cannot be started again: {self._watch.exception()}")

    async def __del__(self) -> None:
        """Serve calls this when the replica stops; the ingress ends its requests in that time, one way or another."""
        if self._watch is None:
            return  # the start failed
        self._watch.cancel()
        await self._processes.drain(self._config.ingress.shutdown_grace_s + DRAIN_MARGIN_S)
        self._processes.kill()


def _report(info: EngineInfo, title: str) -> None:
    """Print what the worker found out, in lines that begin with ``title``."""
    worker, each = info.worker, ""
    quantization = f" ({worker.quantization})" if worker.quantization else ""
    if worker.tensor_parallel_size > 1:
        each = " each"
        report("stage", "ranks", f"{title}: {worker.tensor_parallel_size} workers share every layer (tensor parallel)")
    report("stage", "worker", f"{title}: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in worker.stages)}")
    model = f"{worker.dtype}{quantization} on {worker.device}, CPU threads {worker.threads}"
    weights = f"weights {worker.weights_bytes / 2**20:,.0f} MiB{each}"
    report("stage", "model", f"{title}: {model}, attention {worker.attention_backend}, {weights}")
    tokens = f"{worker.num_blocks * worker.block_size:,} tokens ({worker.kv_cache_bytes / 2**30:.2f} GiB{each})"
    fitting = worker.num_blocks // -(-info.max_model_len // worker.block_size)
    report(
        "stage", "kv", f"{title}: {tokens}, room for {fitting:,} of the longest context, {info.max_model_len:,} tokens"
    )

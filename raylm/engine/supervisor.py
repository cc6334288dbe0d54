"""Engine: the Serve deployment whose replicas each own one engine's processes, and start new ones when one dies."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.util import get_current_placement_group, list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylm.config import Config
from raylm.engine.actor import ENGINE_CORE, LOST, NAMESPACE, create_engine_core
from raylm.engine.deployment.autoscaling import EngineLoad
from raylm.engine.deployment.memory import check_memory
from raylm.engine.deployment.names import EngineName, engine_digest
from raylm.engine.liveness.heartbeats import HeartbeatMonitor
from raylm.engine.load_report import PERIOD_S, LoadReport, Pace
from raylm.engine.ray_executor import answer, as_raylm_error, create_worker, worker_name
from raylm.errors import ConfigError, EngineCrashedError, EngineDiedError, RayLMError
from raylm.messages import EngineInfo
from raylm.ray_private import listen_where_ray_does
from raylm.stages import Source, configure_logs, report
from raylm.worker import available_memory

SUPERVISOR_CPUS = 0.1
ENGINE_CORE_CPUS = 0.1
_SWITCH_S = 30.0  # in which an update's new ingress replicas take over from those that use an old engine
LAST_WORDS_S = 0.3  # for an EngineCore to tell its clients what became of a worker
MOST_STARTS = 3
LOAD_PERIOD_S = 1.0


def placement_bundles(config: Config, gpus: int) -> list[dict[str, float]]:
    """What one engine reserves: for its supervisor, its EngineCore and each of its workers, in this order."""
    device = {"GPU": float(gpus)} if gpus else {"CPU": config.engine.num_cpus}
    core = {"CPU": ENGINE_CORE_CPUS}
    if config.engine.executor == "local":
        return [{"CPU": SUPERVISOR_CPUS}, core | device]
    return [{"CPU": SUPERVISOR_CPUS}, core, *[device] * config.engine.tensor_parallel_size]


def drain_limit_s(config: Config) -> float:
    """How long an engine that is to end may serve those who cannot leave it: at least as long as they themselves."""
    return config.ingress.shutdown_grace_s + _SWITCH_S


class EngineProcesses:
    """One incarnation of an engine: its EngineCore and workers, started together as importing torch takes longest."""

    def __init__(self, config: Config, name: str, engine_id: str, gpus: int, title: str = "") -> None:
        """``title`` begins its lines at the terminal."""
        self.load = EngineLoad()
        self._title = title
        self._held = 0
        _, core, *workers = map(_options, count(), placement_bundles(config, gpus))
        self._monitor = HeartbeatMonitor([ENGINE_CORE, *(worker_name(config, rank) for rank in range(len(workers)))])
        path = self._monitor.path
        own = EngineName.parse(name)
        names = ("" if own is None else own.app_name, engine_id)
        named = {"namespace": NAMESPACE}
        self._workers = [
            create_worker(config, rank, path, names, name=f"Worker {rank} of {name}", **named, **options)
            for rank, options in enumerate(workers)
        ]
        self._core = create_engine_core(config, name, engine_id, self._workers, path, **core)

    async def start(self) -> EngineInfo:
        """Wait until it is ready.

        Raises:
            RayLMError: the configuration cannot be served; EngineDiedError if a process was lost meanwhile.
        """
        starting = asyncio.ensure_future(answer(self._core.start.remote()))
        await asyncio.wait([starting, self._monitor.lost], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            raise EngineDiedError(f"The {' '.join(self._monitor.lost.result())} while the engine started.")
        info: EngineInfo = starting.result()
        self._monitor.on_start()
        return info

    async def run(self) -> str:
        """Until a fault ends it; returns what was lost, and how many requests it held."""
        run, lost = asyncio.ensure_future(self._core.run.remote()), self._monitor.lost
        load = asyncio.create_task(self._follow_load())
        await asyncio.wait([run, lost], return_when=asyncio.FIRST_COMPLETED)
        load.cancel()
        who = lost.result()[0] if lost.done() else ""
        self._monitor.kill(who)  # it may be stopped, and go on one day
        if who != ENGINE_CORE:
            await self._ask_load()
            if self._held:
                await asyncio.wait([run], timeout=LAST_WORDS_S)
        if (reason := _reason(run)).endswith(LOST):
            await asyncio.wait([lost], timeout=LAST_WORDS_S)
            reason = f"The {' '.join(lost.result())}." if lost.done() else reason
        run.cancel()
        return f"{reason} It held {self._held} open requests."

    async def _ask_load(self) -> None:
        """What an EngineCore that is gone held is what it held a moment ago."""
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(LAST_WORDS_S):
                _, self._held = await self._core.load.remote()

    async def _follow_load(self) -> None:
        """Report it while there is any; the end of the EngineCore ends this too."""
        load, pace, told = LoadReport(), Pace(), time.monotonic()
        with suppress(RayError):
            while True:
                await asyncio.sleep(LOAD_PERIOD_S)
                stats, self._held = await self._core.load.remote()
                self.load = pace.load(stats, time.monotonic())
                if (seconds := time.monotonic() - told) < PERIOD_S:
                    continue
                told += seconds
                if line := load.line(stats, seconds):
                    report("stage", "load", f"{self._title}: {line}")

    async def drain(self, limit_s: float) -> None:
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(limit_s):
                await self._core.drain.remote()

    def kill(self) -> None:
        """Safe when the processes are gone already."""
        self._monitor.close()  # Ray alone would wait for stopped ones
        for actor in (self._core, *self._workers):
            ray.kill(actor)


def _reason(run: asyncio.Future[str]) -> str:
    """What the EngineCore says of its end, if it says anything."""
    if not run.done():
        return f"A process{LOST}"
    try:
        return run.result()
    except RayActorError:
        return f"The {ENGINE_CORE}{LOST}"
    except RayError as error:
        return as_raylm_error(error).message


def _options(index: int, bundle: dict[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that takes a whole bundle of the supervisor's placement group."""
    strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=index)
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}


class Engine:
    """Starts one engine and replaces it when a process of it dies; Serve owns the placement group."""

    async def __init__(self, config: Config, gpus: int) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_where_ray_does()
        context = serve.get_replica_context()
        self._config = config
        self._gpus = gpus
        self._app_name = context.app_name
        self._replica = context.replica_tag
        self._incarnation = 0
        self._watch: asyncio.Task[None] | None = None
        configure_logs(config.log_format, Source("engine", self._app_name, self._replica))
        await asyncio.to_thread(self._check_memory)
        self._processes, info = await self._launch()
        _report(info, self._title)
        self._watch = asyncio.create_task(self._keep_alive())

    @property
    def _title(self) -> str:
        return f"{self._app_name}/{self._replica}.{self._incarnation}"

    def _check_memory(self) -> None:
        if self._gpus:
            return
        names = (EngineName.parse(actor["name"]) for actor in list_named_actors(all_namespaces=True))
        others = sum(name is not None and name.app_name == self._app_name for name in names)
        try:
            check_memory(self._config, others, available_memory())
        except ConfigError as error:
            report("error", "engine", f"{self._title}: {error.message}")
            raise

    async def _launch(self) -> tuple[EngineProcesses, EngineInfo]:
        """Start the next incarnation; a start that fails leaves nothing behind."""
        engine_id = f"{self._replica}.{self._incarnation}"
        name = str(EngineName(self._app_name, engine_digest(self._config), engine_id))
        processes = EngineProcesses(self._config, name, engine_id, self._gpus, self._title)
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
            await self._replace()
            report("stage", "engine", f"{self._title} is ready after {time.monotonic() - lost:.1f} s")

    async def _replace(self) -> None:
        """Start the next incarnation, again if it is lost while it starts."""
        for start in range(1, MOST_STARTS + 1):
            self._incarnation += 1
            try:
                self._processes, _ = await self._launch()
            except EngineDiedError as error:
                if isinstance(error, EngineCrashedError) or start == MOST_STARTS:
                    raise
            else:
                return

    async def wake(self) -> None:
        """Does nothing: that a call waits is what makes Serve start a replica."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks this where the number of engines depends on the load."""
        return asdict(self._processes.load)

    async def check_health(self) -> None:
        """Serve calls this; an error, that the engine could not be started again here, replaces the whole replica."""
        if self._watch is not None and self._watch.done():
            raise EngineDiedError(f"The engine cannot be started again: {self._watch.exception()}")

    async def __del__(self) -> None:
        """Serve calls this when the replica stops; the ingress ends its requests in that time, one way or another."""
        if self._watch is None:
            return  # the start failed
        self._watch.cancel()
        await self._processes.drain(drain_limit_s(self._config))
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

"""Engine: the Serve deployment whose replicas each own one engine's processes, and start new ones when one dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util import get_current_placement_group, list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylm.config import Config
from raylm.engine.actor import NAMESPACE, create_engine_core
from raylm.engine.deployment.autoscaling import EngineLoad
from raylm.engine.deployment.memory import check_memory
from raylm.engine.deployment.names import EngineName, engine_digest
from raylm.engine.link import SILENCE_S, START_SILENCE_S, Link, Listener
from raylm.engine.load_report import PERIOD_S, LoadReport, Pace
from raylm.engine.ray_executor import answer, create_worker
from raylm.errors import ConfigError, EngineCrashedError, EngineDiedError, RayLMError
from raylm.messages import CoreReport, EngineInfo, EngineStats
from raylm.ray_private import listen_where_ray_does
from raylm.stages import LogSource, about, configure_logs, report
from raylm.worker import available_memory

SUPERVISOR_CPUS = 0.1
ENGINE_CORE_CPUS = 0.1
_DIGITS = 4  # of a resource, as Ray keeps it
_SWITCH_S = 30.0  # an update's new ingress replicas replace the old ones, which use an old engine, within this time
MOST_STARTS = 3

logger = logging.getLogger("raylm.engine")


def placement_bundles(config: Config, gpus: int) -> list[dict[str, float]]:
    """What one engine reserves: for its supervisor, its EngineCore and each of its workers, in this order.

    With several stages, which may be on several nodes: what is reserved on one node together. The first bundle is for
    supervisor, EngineCore and the last stage, which returns the results, the others are for one stage each.
    """
    device = {"GPU": float(gpus)} if gpus else {"CPU": config.engine.num_cpus}
    core = {"CPU": ENGINE_CORE_CPUS}
    if config.engine.executor == "local":
        return [{"CPU": SUPERVISOR_CPUS}, core | device]
    size, count = config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size
    if count == 1:
        return [{"CPU": SUPERVISOR_CPUS}, core, *[device] * size]
    stage = round(config.engine.num_cpus * size, _DIGITS)
    last = round(SUPERVISOR_CPUS + ENGINE_CORE_CPUS + stage, _DIGITS)
    return [{"CPU": last}, *[{"CPU": stage}] * (count - 1)]


def actor_bundles(config: Config, gpus: int) -> list[tuple[int, dict[str, float]]]:
    """The bundle (its index) of the EngineCore and of each worker, and the part that it takes."""
    size, count = config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size
    if count == 1:
        return list(enumerate(placement_bundles(config, gpus)))[1:]
    worker = {"CPU": config.engine.num_cpus}
    stages = [(stage + 1) % count for stage in range(count)]
    return [(0, {"CPU": ENGINE_CORE_CPUS}), *((bundle, worker) for bundle in stages for _ in range(size))]


def drain_limit_s(config: Config) -> float:
    """How long an engine that is to end may serve ingresses that cannot leave it: no less than they may drain."""
    return config.ingress.shutdown_grace_s + _SWITCH_S


class EngineProcesses:
    """One incarnation of an engine: its EngineCore and workers, started together as importing torch takes longest.

    The EngineCore watches its workers. This class watches only the EngineCore, over its Link, on which the EngineCore
    reports its load and the reason of its end.
    """

    def __init__(self, config: Config, name: str, engine_id: str, gpus: int, title: str = "") -> None:
        """``title`` begins its lines at the terminal."""
        self.load = EngineLoad()
        self._title = title
        self._held = 0
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lines, self._pace, self._told = LoadReport(), Pace(), time.monotonic()
        self._link: Link | None = None
        self._pidfds: list[int] = []  # of the workers
        self._listener = Listener("supervisor")
        core, *workers = [_options(*each) for each in actor_bundles(config, gpus)]
        own = EngineName.parse(name)
        names = ("" if own is None else own.app_name, engine_id)
        named = {"namespace": NAMESPACE}
        self._workers = [
            create_worker(config, rank, names, name=f"Worker {rank} of {name}", **named, **options)
            for rank, options in enumerate(workers)
        ]
        self._core = create_engine_core(config, name, engine_id, self._workers, self._listener.path, **core)

    async def start(self) -> EngineInfo:
        """Wait until it is ready.

        Raises:
            RayLMError: the configuration cannot be served; EngineDiedError if a process was lost meanwhile.
        """
        await self._listener.serve(self._accept)
        starting = asyncio.ensure_future(answer(self._core.start.remote()))
        await asyncio.wait([starting, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            raise EngineDiedError(self._ended.result())
        info: EngineInfo = starting.result()
        if self._link is not None:
            self._link.set_limit(SILENCE_S)
        return info

    async def run(self) -> str:
        """Until a fault ends it; returns what was lost, and how many requests it held."""
        run = asyncio.ensure_future(self._core.run.remote())
        run.add_done_callback(lambda run: run.cancelled() or run.exception())  # its Link tells why it ends
        reason = await self._ended
        return f"{reason} It held {self._held} open requests."

    async def drain(self, limit_s: float) -> None:
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(limit_s):
                await self._core.drain.remote()

    def kill(self) -> None:
        """Safe when the processes are gone already."""
        self._listener.close()
        if self._link is not None:
            if self._link.is_silent:
                self._link.kill()  # Ray alone would wait for a stopped process
            self._link.close()
        for actor in (self._core, *self._workers):
            ray.kill(actor)
        while self._pidfds:  # a worker may be stopped, too
            pidfd = self._pidfds.pop()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _accept(self) -> Link:
        self._link = Link(self._on_value, self._on_end, limit_s=START_SILENCE_S, kills=True)
        return self._link

    def _on_value(self, value: CoreReport | list[int]) -> None:
        if isinstance(value, list):
            with suppress(ProcessLookupError):  # it is gone, which its EngineCore tells
                self._pidfds.extend(os.pidfd_open(pid) for pid in value if pid)
            return
        self._held = value.held
        if value.ended:
            self._end(value.ended)
        else:
            self._on_load(value.stats)

    def _on_load(self, stats: EngineStats) -> None:
        now = time.monotonic()
        self.load = self._pace.load(stats, now)
        if (seconds := now - self._told) >= PERIOD_S:
            self._told = now
            if line := self._lines.line(stats, seconds):
                report("stage", "load", f"{self._title}: {line}")

    def _on_end(self, why: str) -> None:
        if self._link is not None and (words := self._link.last_words):
            logger.error("the EngineCore crashed\n%s", words, extra=about("engine.crashed", traceback=words))
        self._end(f"The EngineCore {why}.")

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)


def _options(index: int, resources: dict[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that takes these resources of a bundle of the supervisor's placement group."""
    strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=index)
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "scheduling_strategy": strategy}


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
        configure_logs(config.log_format, LogSource("engine", self._app_name, self._replica))
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
    for number, part in enumerate(worker.pipeline):
        layers = f"layers {part.first} to {part.last}, weights {part.weights_bytes / 2**20:,.0f} MiB{each}"
        report("stage", "part", f"{title}: stage {number} of {len(worker.pipeline)} has {layers}")
    report("stage", "worker", f"{title}: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in worker.stages)}")
    model = f"{worker.dtype}{quantization} on {worker.device}, CPU threads {worker.threads}"
    weights = f"weights {worker.weights_bytes / 2**20:,.0f} MiB{each}"
    report("stage", "model", f"{title}: {model}, attention {worker.attention_backend}, {weights}")
    tokens = f"{worker.num_blocks * worker.block_size:,} tokens ({worker.kv_cache_bytes / 2**30:.2f} GiB{each})"
    fitting = worker.num_blocks // -(-info.max_model_len // worker.block_size)
    report("stage", "kv", f"{title}: {tokens}, enough for {fitting:,} sequences of {info.max_model_len:,} tokens")

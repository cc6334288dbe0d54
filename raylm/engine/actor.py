"""EngineCoreActor: the Ray shell of one EngineCore; it owns the core's run and the streams to its clients."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from raylm.config import Config
from raylm.engine.client_link import ClientLink, drop_lost_client, take_batch
from raylm.engine.deployment.names import EngineName
from raylm.engine.engine_core import EngineCore
from raylm.engine.link import SILENCE_S, Link, Listener, Silence
from raylm.engine.model_executor import LocalExecutor, ModelExecutor
from raylm.engine.parallel_executor import ParallelExecutor
from raylm.engine.parking import PERIOD_S
from raylm.engine.ray_executor import RayExecutor, prepare_process
from raylm.errors import EngineCrashedError, EngineDiedError
from raylm.messages import (
    ClientBatch,
    CoreReport,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    LoRAAdapter,
    ParkedTokens,
)
from raylm.stages import LogSource, about, configure_logs

logger = logging.getLogger("raylm.engine")

NAMESPACE = "raylm"
REPORT_S = 1.0  # to the supervisor, and to clients on other nodes
LAST_WORDS_S = 0.3
_DRAIN_POLL_S = 0.05


class EngineCoreActor:
    """One engine's scheduler in a process of its own, without torch unless the executor is local."""

    def __init__(
        self, config: Config, engine_id: str, workers: list[ActorHandle], supervisor: str | None = None
    ) -> None:
        own = EngineName.parse(ray.get_runtime_context().get_actor_name() or "")
        configure_logs(config.log_format, LogSource("engine core", own.app_name if own else "", engine_id))
        self._core = EngineCore(config, _executor(config, workers, self._tell_supervisor))
        self._engine_id = engine_id
        self._supervisor_path = supervisor
        self._supervisor: Link | None = None
        self._lost = False
        self._silences: dict[str, Silence] = {}  # of the clients on other nodes
        self._listener: Listener | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_event_loop().create_future()

    async def start(self) -> EngineInfo:
        if self._supervisor_path is not None:
            self._supervisor = await Link.connect(self._supervisor_path, lambda _: None, lambda _: None)
            self._supervisor.send_last_words()
        worker = await self._core.start()
        info = EngineInfo(self._engine_id, worker.max_model_len, worker, await self._await_clients())
        self._ready.set_result(info)
        tune_gc()
        return info

    async def _await_clients(self) -> tuple[str, str]:
        """Listen for the clients of this node; returns node and path, or ("", "") if they are to come over Ray."""
        try:
            self._listener = Listener("clients", self._supervisor_path)  # which outlives this process
        except OSError as error:  # the disk is full
            logger.warning("outputs go through Ray: %s", error, extra=about("outputs.through_ray"))
            return "", ""
        await self._listener.serve(lambda: ClientLink(self._core).link)
        return ray.get_runtime_context().get_node_id(), self._listener.path

    async def run(self) -> str:
        """Schedule steps until the engine is lost; returns why, and reports it to the supervisor."""
        tasks = [asyncio.create_task(self._keep_house()), asyncio.create_task(self._report_load())]
        ended = "The EngineCore has stopped."
        try:
            await self._core.run()
        except EngineDiedError as error:
            self._lost = True
            ended = error.message
            if not isinstance(error.__cause__, RayActorError | ConnectionError):
                logger.error("the engine failed", exc_info=error, extra=about("engine.failed"))
        finally:
            for task in tasks:
                task.cancel()
            await self._until_clients_know()
            self._tell_supervisor(replace(await self.load(), ended=ended))
        return ended

    async def _until_clients_know(self) -> None:
        """Clients leave when they have the reason. The supervisor ends this process when it has it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._core.has_clients:  # noqa: ASYNC110 - asked once in an engine's life
                    await asyncio.sleep(0.01)

    async def load(self) -> CoreReport:
        """What it does now."""
        scheduler = self._core.scheduler
        stats = replace(scheduler.stats(), others=scheduler.loads.others(""))
        return CoreReport(stats, self._core.held_requests)

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._tell_supervisor(await self.load())

    def _tell_supervisor(self, value: CoreReport | list[int]) -> None:
        """A report, or the processes of the workers."""
        if self._supervisor is not None:
            self._supervisor.send(value)

    async def snapshot(self) -> EngineSnapshot:
        return self._core.scheduler.snapshot()

    async def _keep_house(self) -> None:
        """Between requests look for cycles of garbage; let what is parked age."""
        collected_at = 0  # step
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._core.has_work and (steps := self._core.scheduler.stats().steps) > collected_at:
                gc.collect()
                collected_at = steps
            self._core.pass_period(PERIOD_S)

    async def drain(self) -> None:
        """Tell the clients that this engine ends, and wait until they have left.

        They do when they have another one, or end themselves; until then what they ask is answered.
        """
        self._core.drain()
        while self._core.has_clients:  # noqa: ASYNC110 - asked once in an engine's life
            await asyncio.sleep(_DRAIN_POLL_S)

    async def info(self) -> EngineInfo:
        """Waits until the engine is ready."""
        return await asyncio.shield(self._ready)

    async def stream(self, client_id: str) -> AsyncIterator[EngineCoreOutputs]:
        """All outputs for one client on another node, until the engine is lost, and one at least each REPORT_S.

        After the first item the client's batches may come. Ray holds back the next item while some are not taken;
        meanwhile the outbox merges. The stream ends with EngineCrashedError where what was computed brought the engine
        down, and with EngineUnavailableError where the client is given up, as it was silent.

        When the client ends the stream Ray closes this generator, which ends the client's requests. When its process
        dies its silence does, as Ray does not always close the generator then.
        """
        outbox = self._core.connect(client_id)
        silence = Silence(lambda: drop_lost_client(self._core, client_id, outbox), SILENCE_S)
        self._silences[client_id] = silence
        try:
            while not self._lost:
                try:
                    async with asyncio.timeout(REPORT_S):
                        outputs = await outbox.get()
                except TimeoutError:
                    self._core.report(client_id)
                else:
                    yield outputs
        except EngineCrashedError:
            raise
        except EngineDiedError:
            return
        finally:
            silence.stop()
            del self._silences[client_id]
            self._core.drop_client(client_id, outbox)

    async def submit(self, client_id: str, batch: ClientBatch) -> None:
        """Take a batch of a client on another node; an empty one only says that the client is there."""
        if (silence := self._silences.get(client_id)) is not None:
            silence.heard()
        take_batch(self._core, client_id, batch)

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        return self._core.take_parked(request)

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        await self._core.load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        await self._core.unload_adapter(name)


def tune_gc() -> None:
    """Let no collection stop the steps: what waits is never walked through, cycles are looked for while it is idle.

    Requests leave no cycles behind. Collections of the young take under a millisecond by these thresholds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)


def _executor(config: Config, workers: list[ActorHandle], on_pids: Callable[[list[int]], None]) -> ModelExecutor:
    if config.engine.executor == "local":
        prepare_process()
        return LocalExecutor(config)
    return (RayExecutor if len(workers) == 1 else ParallelExecutor)(workers, on_pids, config.engine)


def create_engine_core(
    config: Config,
    name: str,
    engine_id: str,
    workers: list[ActorHandle],
    supervisor: str | None = None,
    **options: Any,
) -> ActorHandle:
    """Start the process of one EngineCore, which is never restarted.

    ``supervisor`` is the path where its supervisor listens; ``options`` are Ray's (resources, placement).
    """
    return (
        ray.remote(EngineCoreActor)
        .options(name=name, namespace=NAMESPACE, max_restarts=0, max_task_retries=0, **options)
        .remote(config, engine_id, workers, supervisor)
    )

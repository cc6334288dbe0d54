"""EngineCoreActor: the Ray shell of one EngineCore; it owns the core's run and the streams to its clients."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from raylm.config import Config
from raylm.engine.channels.outputs import OutputSender
from raylm.engine.deployment.names import EngineName
from raylm.engine.engine_core import EngineCore
from raylm.engine.liveness.heartbeats import send_heartbeats
from raylm.engine.liveness.leases import PERIOD_S, Leases
from raylm.engine.model_executor import LocalExecutor, ModelExecutor
from raylm.engine.outbox import Outbox
from raylm.engine.ray_executor import RayExecutor, prepare_process
from raylm.engine.tensor_parallel_executor import TensorParallelExecutor
from raylm.errors import EngineCrashedError, EngineDiedError
from raylm.messages import (
    ClientBatch,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    EngineStats,
    LoRAAdapter,
    ParkedTokens,
)
from raylm.stages import Source, about, configure_logs

logger = logging.getLogger("raylm.engine")

NAMESPACE = "raylm"
ENGINE_CORE = "EngineCore"  # as it signs its heartbeats
LOST = " was lost."
_DRAIN_POLL_S = 0.05


class EngineCoreActor:
    """One engine's scheduler in a process of its own, without torch unless the executor is local."""

    def __init__(
        self, config: Config, engine_id: str, workers: list[ActorHandle], heartbeats: str | None = None
    ) -> None:
        own = EngineName.parse(ray.get_runtime_context().get_actor_name() or "")
        configure_logs(config.log_format, Source("engine core", own.app_name if own else "", engine_id))
        if heartbeats is not None:
            send_heartbeats(heartbeats, ENGINE_CORE)
        self._core = EngineCore(config, _executor(config, workers))
        self._engine_id = engine_id
        self._lost = False
        self._leases = Leases()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_event_loop().create_future()

    async def start(self) -> EngineInfo:
        worker = await self._core.start()
        info = EngineInfo(self._engine_id, worker.max_model_len, worker)
        self._ready.set_result(info)
        tune_gc()
        return info

    async def run(self) -> str:
        """Schedule steps until the engine is lost; returns why; it ends with LOST if a process was."""
        leases = asyncio.create_task(self._follow_leases())
        try:
            await self._core.run()
        except EngineDiedError as error:
            self._lost = True
            if isinstance(error.__cause__, RayActorError):
                return error.message
            logger.error("the engine failed", exc_info=error, extra=about("engine.failed"))
            return error.message
        finally:
            leases.cancel()
        return "The EngineCore has stopped."

    async def load(self) -> tuple[EngineStats, int]:
        """What it does now, for all clients as ``others``, and the requests that it holds or held when it was lost."""
        scheduler = self._core.scheduler
        return replace(scheduler.stats(), others=scheduler.loads.others("")), self._core.held_requests

    async def snapshot(self) -> EngineSnapshot:
        return self._core.scheduler.snapshot()

    async def _follow_leases(self) -> None:
        """What a client has open ends when it is gone, whether or not Ray closes its stream."""
        collected_at = 0  # step
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._core.has_work and (steps := self._core.scheduler.stats().steps) > collected_at:
                gc.collect()
                collected_at = steps
            for client_id in self._leases.expired():
                if requests := self._core.scheduler.open_requests(client_id):
                    logger.warning(
                        "an ingress is gone; its %d open requests end", len(requests), extra=about("ingress.lost")
                    )
                self._core.drop_client(client_id)
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

    async def stream(self, client_id: str, channel: tuple[str, str]) -> AsyncIterator[bool | EngineCoreOutputs]:
        """All outputs for one client, until the engine is lost.

        The first item says that its batches may come now, and whether the outputs come to the OutputListener in
        ``channel`` (the client's node, path); they do where that is this process's node. Otherwise they are the
        further items: Ray holds back the next one while some are not taken; meanwhile, in both cases, the outbox
        merges. The stream ends with EngineCrashedError where what was computed brought the engine down.

        When the client ends the stream Ray closes this generator, which ends the client's requests; so does the end of
        the channel. When its process dies the lease ends, as Ray does not always close it then.
        """
        outbox, sender = self._core.connect(client_id), None
        try:
            if channel[0] == ray.get_runtime_context().get_node_id():
                sender = await self._connect(client_id, channel[1], outbox)
            yield sender is not None
            while (outputs := await outbox.get()) and not self._lost:
                if sender is None:
                    yield outputs
                else:
                    await sender.send(outputs)
        except EngineCrashedError:
            raise
        except EngineDiedError:
            return
        finally:
            if sender is not None:
                sender.close()
            self._core.drop_client(client_id, outbox)
            self._leases.end(client_id)

    async def _connect(self, client_id: str, path: str, outbox: Outbox) -> OutputSender | None:
        def renew() -> None:
            self._leases.renew(client_id)

        try:
            return await OutputSender.connect(path, renew, lambda: self._core.drop_client(client_id, outbox))
        except OSError as error:  # it is in a container of its own
            logger.warning("outputs for %s go through Ray: %s", path, error, extra=about("outputs.through_ray"))
            return None

    async def submit(self, client_id: str, batch: ClientBatch) -> None:
        """Take a batch, which renews the client's lease even if it is empty."""
        self._leases.renew(client_id)
        self._core.add(client_id, batch.adds, batch.sent)
        self._core.abort(client_id, batch.aborts)
        self._core.stop(client_id, batch.stops)
        if batch.watch_blocks:
            self._core.watch_blocks(client_id)

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


def _executor(config: Config, workers: list[ActorHandle]) -> ModelExecutor:
    if config.engine.executor == "local":
        prepare_process()
        return LocalExecutor(config)
    return RayExecutor(workers) if len(workers) == 1 else TensorParallelExecutor(workers)


def create_engine_core(
    config: Config,
    name: str,
    engine_id: str,
    workers: list[ActorHandle],
    heartbeats: str | None = None,
    **options: Any,
) -> ActorHandle:
    """Start the process of one EngineCore, which is never restarted.

    ``heartbeats`` is the path of its HeartbeatMonitor; ``options`` are Ray's (resources, placement).
    """
    return (
        ray.remote(EngineCoreActor)
        .options(name=name, namespace=NAMESPACE, max_restarts=0, max_task_retries=0, **options)
        .remote(config, engine_id, workers, heartbeats)
    )

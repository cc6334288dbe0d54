"""RayEngineClient: this process's line to one EngineCore actor; it owns the stream of outputs and the sender task."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import ray
from ray import ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from raylm.engine import MAX_OUTPUTS_IN_FLIGHT, RENEWAL_S, OutputListener, OutputReceiver, as_raylm_error
from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.messages import (
    ClientBatch,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    LoRAAdapter,
    ParkedTokens,
)
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

_NO_CHANNEL = "", ""  # no node has this name
_LOST = "The engine that served this request was lost; sending it again is safe."


class RayEngineClient(EngineClient):
    """One stream down and one task up, whatever the number of requests; both are started here and never in a request.

    Ray cancels what a cancelled request started, recursively; so a request only puts into this client's lists, and
    what collects there while a batch is on its way makes the next one.
    """

    def __init__(self, core: ActorHandle, info: EngineInfo, channel: tuple[str, str]) -> None:
        self.info = info
        self.left = asyncio.Event()  # set by close
        self.dropped = False  # by an engine that lives: this process did not get its turn, and its lease ended
        self._core = core
        self._client_id = uuid.uuid4().hex
        self._batch = ClientBatch([], [])
        self._wake = asyncio.Event()
        self._stream: ObjectRefGenerator = core.stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=MAX_OUTPUTS_IN_FLIGHT
        ).remote(self._client_id, channel)
        self._receiver: OutputReceiver | None = None  # where outputs do not come through Ray
        self._calls: asyncio.Queue[tuple[str, object, asyncio.Future[None]]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, core: ActorHandle) -> RayEngineClient:
        """Wait until the engine is ready, then open the stream; EngineDiedError if it ends before that."""
        listener = _listener()
        try:
            client = cls(core, await core.info.remote(), (own_node(), listener.path) if listener else _NO_CHANNEL)
            if await (await anext(client._stream)) and listener is not None:
                client._receiver = await listener.accept()
        except RayError as error:
            raise EngineDiedError("The engine ended before it was ready.") from error
        finally:
            if listener is not None:
                listener.close()
        client._tasks = [asyncio.create_task(client._send()), asyncio.create_task(client._make_calls())]
        return client

    def add(self, request: EngineCoreRequest) -> None:
        self._batch.adds.append(request)
        self._wake.set()

    def abort(self, keys: list[int]) -> None:
        self._batch.aborts.extend(keys)
        self._wake.set()

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        self._batch.stops.extend(sequences)
        self._wake.set()

    def watch_blocks(self) -> None:
        self._batch = replace(self._batch, watch_blocks=True)
        self._wake.set()

    async def _send(self) -> None:
        """Send batch after batch, and renew the lease in between: by the channel, or by an empty batch.

        What the engine refuses would never be answered, so the stream ends then too.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL_S):
                    await self._wake.wait()
            if self._receiver is not None and not self._wake.is_set():
                self._receiver.renew()
                continue
            self._wake.clear()
            batch, self._batch = self._batch, ClientBatch([], [])
            try:
                await self._core.submit.remote(self._client_id, replace(batch, sent=time.time()))
            except RayError as error:
                if not isinstance(getattr(error, "cause", error), RayActorError | RayLMError):
                    engine_id = self.info.engine_id
                    failed = about("engine.failed", engine=engine_id)
                    logger.exception("engine %s could not take a batch", engine_id, extra=failed)
                ray.cancel(self._stream)
                return

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        try:
            parked: ParkedTokens | None = await self._core.take_parked.remote(request)
        except RayError as error:
            raise EngineDiedError(_LOST) from error
        return parked

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        await self._call("load_adapter", adapter)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def snapshot(self) -> EngineSnapshot:
        try:
            snapshot: EngineSnapshot = await self._core.snapshot.remote()
        except RayError as error:
            raise EngineDiedError(_LOST) from error
        return snapshot

    async def _call(self, method: str, argument: object) -> None:
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((method, argument, result))
        await result

    async def _make_calls(self) -> None:
        """Make one call after the other, in a task that the end of a request does not cancel."""
        while True:
            method, argument, result = await self._calls.get()
            error: Exception | None = EngineDiedError(_LOST)
            try:
                await getattr(self._core, method).remote(argument)
                error = None
            except RayError as failure:
                error = as_raylm_error(failure)
            finally:
                _settle(result, error)

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        try:
            if self._receiver is not None:
                async for outputs in self._receiver.outputs():
                    yield outputs
            async for ref in self._stream:
                yield await ref
        except RayError as error:
            cause = as_raylm_error(error)
            self.dropped = type(cause) is EngineUnavailableError
            raise (cause if isinstance(cause, EngineCrashedError) else EngineDiedError(_LOST)) from error
        raise EngineDiedError(_LOST)

    async def close(self) -> None:
        """Leave the engine, which ends this client's requests; dropping the stream alone would leave it running."""
        for task in self._tasks:
            task.cancel()
        while not self._calls.empty():
            _settle(self._calls.get_nowait()[2], EngineDiedError(_LOST))
        ray.cancel(self._stream)
        self.left.set()
        if self._receiver is not None:
            await self._receiver.close()


def _listener() -> OutputListener | None:
    try:
        return OutputListener()
    except OSError as error:  # the disk is full
        logger.warning("outputs come through Ray: %s", error, extra=about("outputs.through_ray"))
        return None


def own_node() -> str:
    """The id of the node that this process is on."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def _settle(result: asyncio.Future[None], error: Exception | None) -> None:
    if result.done():  # the caller was cancelled
        return
    if error is None:
        result.set_result(None)
    else:
        result.set_exception(error)

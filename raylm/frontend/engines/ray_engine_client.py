"""EngineClients for an EngineCore in another process: over a Link on the same node, over Ray on another node."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from raylm.engine import MAX_OUTPUTS_IN_FLIGHT, REPORT_S, SILENCE_S, Link, Silence, as_raylm_error
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

T = TypeVar("T")

logger = logging.getLogger("raylm.frontend")

_LOST = "The engine that served this request was lost; sending it again is safe."


async def connect_engine(core: ActorHandle) -> ActorEngineClient:
    """Wait until the engine is ready, then connect: over a Link if it is on this node, else over Ray.

    Raises:
        EngineDiedError: the engine ended before it was ready.
        TimeoutError: the engine is ready, but does not answer within SILENCE_S. It may answer later.
    """
    try:
        info: EngineInfo = await core.info.remote()
        node_id, path = info.link
        if node_id == own_node():
            try:
                return await LinkEngineClient.connect(core, info, path)
            except OSError as error:  # the engine is in another container, or has just ended
                logger.warning("outputs come through Ray: %s", error, extra=about("outputs.through_ray"))
        return await RayEngineClient.connect(core, info)
    except RayError as error:
        raise EngineDiedError("The engine ended before it was ready.") from error


class ActorEngineClient(EngineClient):
    """A client of one EngineCore actor. Rare calls are Ray calls; subclasses transport batches and outputs.

    Ray cancels the calls of a cancelled task recursively. So a request's task only appends to lists of this client.
    """

    def __init__(self, core: ActorHandle, info: EngineInfo) -> None:
        self.info = info
        self.left = asyncio.Event()  # set by close
        self.dropped = False  # by a live engine, because this process was silent too long
        self._core = core
        self._client_id = uuid.uuid4().hex
        self._batch = ClientBatch([], [])
        self._received: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._calls: asyncio.Queue[tuple[str, object, asyncio.Future[None]]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._make_calls())]

    @abstractmethod
    def _send_soon(self) -> None:
        """Send the batch soon, because something was added."""

    def _on_received(self) -> None:
        """Called after ``outputs`` has taken a message."""

    def _take_batch(self) -> ClientBatch:
        batch, self._batch = self._batch, ClientBatch([], [])
        return replace(batch, sent=time.time())

    def add(self, request: EngineCoreRequest) -> None:
        self._batch.adds.append(request)
        self._send_soon()

    def abort(self, keys: list[int]) -> None:
        self._batch.aborts.extend(keys)
        self._send_soon()

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        self._batch.stops.extend(sequences)
        self._send_soon()

    def watch_blocks(self) -> None:
        self._batch = replace(self._batch, watch_blocks=True)
        self._send_soon()

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        return await _answer(self._core.take_parked.remote(request))

    async def snapshot(self) -> EngineSnapshot:
        return await _answer(self._core.snapshot.remote())

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        await self._call("load_adapter", adapter)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def _call(self, method: str, argument: object) -> None:
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((method, argument, result))
        await result

    async def _make_calls(self) -> None:
        """Make the calls in order, in a task that the end of a request does not cancel."""
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
        while True:
            received = await self._received.get()
            self._on_received()
            if isinstance(received, EngineCoreOutputs):
                yield received
                continue
            self.dropped = type(received) is EngineUnavailableError
            if isinstance(received, EngineCrashedError):
                raise received
            raise EngineDiedError(_LOST) from received

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        while not self._calls.empty():
            _settle(self._calls.get_nowait()[2], EngineDiedError(_LOST))
        self._received.put_nowait(EngineDiedError(_LOST))
        self.left.set()


class LinkEngineClient(ActorEngineClient):
    """Sends and receives over a Link. Requests of one turn of the event loop are one batch."""

    _link: Link
    _is_due = False

    @classmethod
    async def connect(cls, core: ActorHandle, info: EngineInfo, path: str) -> LinkEngineClient:
        """Connect to the EngineCore that listens at ``path``. Raises OSError if no process listens."""
        client = cls(core, info)
        try:
            client._link = await Link.connect(path, client._on_value, client._on_end)
        except OSError:
            await ActorEngineClient.close(client)
            raise
        client._link.send(client._client_id)
        return client

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        self._link.send(self._take_batch())

    def _on_value(self, value: EngineCoreOutputs | RayLMError) -> None:
        self._received.put_nowait(value)
        if self._received.qsize() >= MAX_OUTPUTS_IN_FLIGHT:
            self._link.pause()

    def _on_received(self) -> None:
        if self._received.empty():
            self._link.resume()

    def _on_end(self, why: str) -> None:
        self._received.put_nowait(EngineDiedError(f"The engine {why}."))

    async def close(self) -> None:
        """Disconnect from the engine, which ends this client's requests."""
        self._link.close()
        await super().close()
        await asyncio.sleep(0)  # the event loop closes the socket


class RayEngineClient(ActorEngineClient):
    """Uses one Ray stream for outputs and one Ray call at a time for batches, for any number of requests.

    Requests that arrive while a batch is being sent form the next batch. The engine is lost if it is silent for
    SILENCE_S, on the stream or in acknowledging a batch. Ray itself notices a lost node only after a minute.
    """

    def __init__(self, core: ActorHandle, info: EngineInfo) -> None:
        super().__init__(core, info)
        self._received = asyncio.Queue(MAX_OUTPUTS_IN_FLIGHT)
        self._wake = asyncio.Event()
        self._stream = core.stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=MAX_OUTPUTS_IN_FLIGHT
        ).remote(self._client_id)

    @classmethod
    async def connect(cls, core: ActorHandle, info: EngineInfo) -> RayEngineClient:
        """Open the stream. Raises RayError if the engine ends before that, TimeoutError after SILENCE_S."""
        client = cls(core, info)
        try:
            async with asyncio.timeout(SILENCE_S):
                client._received.put_nowait(await (await anext(client._stream)))
        except BaseException:
            await client.close()
            raise
        client._tasks += [asyncio.create_task(client._send()), asyncio.create_task(client._read())]
        return client

    def _send_soon(self) -> None:
        self._wake.set()

    async def _send(self) -> None:
        """Send batches one after another, an empty one at least every REPORT_S.

        If the engine rejects a batch, its requests would never be answered, so the stream is ended too.
        """
        while True:
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            silence = Silence(self._give_up, SILENCE_S)
            try:
                await self._core.submit.remote(self._client_id, self._take_batch())
            except RayError as error:
                if not isinstance(getattr(error, "cause", error), RayActorError | RayLMError):
                    engine_id = self.info.engine_id
                    failed = about("engine.failed", engine=engine_id)
                    logger.exception("engine %s rejected a batch of requests", engine_id, extra=failed)
                ray.cancel(self._stream)
                return
            finally:
                silence.stop()

    async def _read(self) -> None:
        def not_while_full() -> None:
            if self._received.full():
                silence.heard()

        silence = Silence(self._give_up, SILENCE_S, not_while_full)
        error: Exception = EngineDiedError(_LOST)
        try:
            async for ref in self._stream:
                outputs = await ref
                silence.heard()
                await self._received.put(outputs)
        except RayError as failure:
            error = as_raylm_error(failure)
        finally:
            silence.stop()
        await self._received.put(error)

    def _give_up(self) -> None:
        """Give up a silent engine.

        Unread outputs are dropped: its requests continue elsewhere from the tokens they have.
        """
        for task in self._tasks[1:]:
            task.cancel()
        ray.cancel(self._stream)
        while not self._received.empty():
            self._received.get_nowait()
        self._received.put_nowait(EngineDiedError(f"The engine has given no sign of life for {SILENCE_S:g} s."))

    async def close(self) -> None:
        """Disconnect from the engine, which ends this client's requests.

        Dropping the stream alone would leave it running.
        """
        ray.cancel(self._stream)
        while not self._received.empty():
            self._received.get_nowait()
        await super().close()


def own_node() -> str:
    """The id of this process's node."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


async def _answer(call: Awaitable[T]) -> T:
    """The engine's answer to a call. Raises EngineDiedError if it takes longer than SILENCE_S."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await call
    except (RayError, TimeoutError) as error:
        raise EngineDiedError(_LOST) from error


def _settle(result: asyncio.Future[None], error: Exception | None) -> None:
    if result.done():  # the caller was cancelled
        return
    if error is None:
        result.set_result(None)
    else:
        result.set_exception(error)

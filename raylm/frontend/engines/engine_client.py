"""EngineClient: AsyncLLM's line to one EngineCore; and LocalEngineClient, for a core on this very event loop."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from raylm.errors import RayLMError
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, EngineSnapshot, LoRAAdapter, ParkedTokens

if TYPE_CHECKING:
    from raylm.engine import EngineCore


class EngineClient(ABC):
    """One ready engine. Requests are only put into a local queue: that never blocks and never raises."""

    info: EngineInfo
    draining = False  # it is about to end; set by the Router

    @abstractmethod
    def add(self, request: EngineCoreRequest) -> None:
        """Hand over a request; its key must be unique for this client."""

    @abstractmethod
    def abort(self, keys: list[int]) -> None:
        """Give up requests; unknown and finished keys are ignored."""

    @abstractmethod
    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """Give up single sequences, as (key, index); unknown and finished ones are ignored."""

    @abstractmethod
    def watch_blocks(self) -> None:
        """Ask to be told which blocks the engine's prefix cache holds: all of them once, then what changes."""

    @abstractmethod
    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        """What the engine has drawn for this request under its name, for a client that is gone; given only once.

        Raises:
            EngineDiedError: it is gone.
        """

    @abstractmethod
    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """Let the engine load a LoRA adapter; returns when requests may use it."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Let the engine take an adapter out of use; unknown ones are ignored."""

    @abstractmethod
    async def snapshot(self) -> EngineSnapshot:
        """What the engine holds now.

        Raises:
            EngineDiedError: it is gone.
        """

    @abstractmethod
    def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """The one stream of everything this client's requests produced; consumed once, started at boot.

        Raises:
            EngineDiedError: the engine is gone; every open request of this client is lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """Abort all that is open and leave the engine."""


class LocalEngineClient(EngineClient):
    """Calls the core directly; an engine that is gone is reported by the stream alone."""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        self._client_id = uuid.uuid4().hex
        self._outbox = core.connect(self._client_id)

    def add(self, request: EngineCoreRequest) -> None:
        with suppress(RayLMError):
            self._core.add(self._client_id, [request])

    def abort(self, keys: list[int]) -> None:
        self._core.abort(self._client_id, keys)

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        self._core.stop(self._client_id, sequences)

    def watch_blocks(self) -> None:
        self._core.watch_blocks(self._client_id)

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        return self._core.take_parked(request)

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        await self._core.load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        await self._core.unload_adapter(name)

    async def snapshot(self) -> EngineSnapshot:
        return self._core.scheduler.snapshot()

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            yield await self._outbox.get()

    async def close(self) -> None:
        self._core.drop_client(self._client_id, self._outbox)

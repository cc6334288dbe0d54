"""EngineClient: the connection of AsyncLLM to one EngineCore; LocalEngineClient, for a core on the same event loop."""

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
    """A client of one ready engine. Methods that send requests only append to a queue: they do not block or raise."""

    info: EngineInfo
    draining = False  # about to end; set by the Router

    @abstractmethod
    def add(self, request: EngineCoreRequest) -> None:
        """Send a request. Its key must be unique for this client."""

    @abstractmethod
    def abort(self, keys: list[int]) -> None:
        """End requests. Ignores unknown and finished keys."""

    @abstractmethod
    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """End single sequences (key, index). Ignores unknown and finished ones."""

    @abstractmethod
    def watch_blocks(self) -> None:
        """Ask the engine to report the blocks of its prefix cache: first all, then each change."""

    @abstractmethod
    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        """Take the tokens that the engine parked under the request's name. The engine returns them only once.

        Raises:
            EngineDiedError: the engine is gone.
        """

    @abstractmethod
    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """Load a LoRA adapter in the engine. Returns when requests may use it."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from the engine. Ignores unknown names."""

    @abstractmethod
    async def snapshot(self) -> EngineSnapshot:
        """The current state of the engine.

        Raises:
            EngineDiedError: the engine is gone.
        """

    @abstractmethod
    def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """All outputs of this client's requests. Must be iterated once, from start.

        Raises:
            EngineDiedError: the engine is gone. All open requests of this client are lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """Abort all open requests and disconnect from the engine."""


class LocalEngineClient(EngineClient):
    """Calls the core directly. Only the stream of outputs reports that the engine is gone."""

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

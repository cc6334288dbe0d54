"""LocalEngineClient: the line to an EngineCore on this very event loop."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from raylm.engine import EngineCore
from raylm.errors import RayLMError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, LoRAAdapter


class LocalEngineClient(EngineClient):
    """Calls the core directly; an engine that is gone is reported by the stream alone."""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        self._client_id = uuid.uuid4().hex
        self._outbox = core.connect(self._client_id)
        self._lost = False

    def add(self, request: EngineCoreRequest) -> None:
        """Hand over a request."""
        if self._lost:
            return
        try:
            self._core.add(self._client_id, [request])
        except RayLMError:
            self._lost = True

    def abort(self, keys: list[int]) -> None:
        """Give up requests."""
        self._core.abort(self._client_id, keys)

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """Give up single sequences."""
        self._core.stop(self._client_id, sequences)

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """Ask the core."""
        await self._core.load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        """Ask the core."""
        await self._core.unload_adapter(name)

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """The stream, which ends only with the engine.

        Raises:
            EngineDiedError: the engine is gone.
        """
        while True:
            yield await self._outbox.get()

    async def close(self) -> None:
        """Abort all that is open and leave the engine."""
        self._core.drop_client(self._client_id, self._outbox)

"""EngineClient: AsyncLLM's line to one EngineCore, whether that lives in this process or in an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, LoRAAdapter


class EngineClient(ABC):
    """One ready engine. Requests are only put into a local queue: that never blocks and never raises."""

    info: EngineInfo

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
    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """Let the engine load a LoRA adapter; returns when requests may use it.

        Raises:
            RayLMError: it cannot.
        """

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Let the engine take an adapter out of use; unknown ones are ignored.

        Raises:
            EngineDiedError: the engine is gone.
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

"""EngineClient: AsyncLLM's line to one EngineCore, whether that lives in this process or in an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo


class EngineClient(ABC):
    """One ready engine. What it is told is only put into a local queue: that never blocks and never raises."""

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
    def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """The one stream of everything this client's requests produced; consumed once, started at boot.

        Raises:
            EngineDiedError: the engine is gone; every open request of this client is lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """Abort all that is open and leave the engine."""

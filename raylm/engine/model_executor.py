"""ModelExecutor: how an EngineCore drives its workers; this module holds the interface and the in-process member."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable

from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo


class ModelExecutor(ABC):
    """Owns the worker handles and the steps in flight.

    Workers run steps strictly in the order in which ``execute`` was called; a step may be handed over before
    the one before it has returned.
    """

    @abstractmethod
    async def start(self) -> WorkerInfo:
        """Load weights, profile, allocate the KV pool; return what was found out.

        Raises:
            ConfigError: the model cannot be served as configured.
        """

    @abstractmethod
    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        """Hand one step to the workers at once; the awaitable gives the output rank's result.

        Raises (from the awaitable):
            EngineDiedError: a worker is gone; no later step will succeed.
        """

    @abstractmethod
    async def shutdown(self) -> None:
        """End the workers; safe to call twice and after a failed start."""

"""ModelExecutor: how an EngineCore drives its workers; this module holds the interface and the in-process member."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from raylm.config import Config
from raylm.errors import EngineDiedError
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.worker import Worker

T = TypeVar("T")


class ModelExecutor(ABC):
    """Owns the worker handles and the steps in flight.

    Workers run steps strictly in the order in which ``execute`` was called; a step may be handed over before
    the one before it has returned. EngineDiedError says that a worker is gone; no later step will succeed.
    """

    @abstractmethod
    async def start(self) -> WorkerInfo:
        """Load weights, profile, allocate the KV pool; ConfigError if the model cannot be served as configured."""

    @abstractmethod
    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        """Hand one step to the workers at once; the awaitable gives the output rank's result."""

    @abstractmethod
    async def prepare_grammar(self, grammar: str) -> None:
        """Return when the workers have compiled a grammar, beside the steps."""

    @abstractmethod
    async def load_adapter(self, adapter: int, path: str) -> str:
        """Load a LoRA adapter under a number, steps go on where they can; returns the digest of its content.

        Raises:
            InvalidRequestError: it does not fit.
        """

    @abstractmethod
    async def unload_adapter(self, adapter: int) -> None:
        """The adapter must not be used by any step in flight."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the workers; safe to call twice and after a failed start."""


class LocalExecutor(ModelExecutor):
    """One worker on one thread of this process; a single thread is what keeps the steps in order."""

    def __init__(self, config: Config, worker_factory: Callable[[Config], Worker] = Worker) -> None:
        self._config = config
        self._worker_factory = worker_factory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylm-worker")
        self._worker: Worker | None = None
        self._died_of: Exception | None = None

    async def start(self) -> WorkerInfo:
        return await self._on_thread(self._start)

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        return self._on_thread(self._execute, plan)

    async def prepare_grammar(self, grammar: str) -> None:
        await asyncio.to_thread(self._live_worker.prepare_grammar, grammar)

    async def load_adapter(self, adapter: int, path: str) -> str:
        return await self._on_thread(self._live_worker.load_adapter, adapter, path)

    async def unload_adapter(self, adapter: int) -> None:
        await self._on_thread(self._live_worker.unload_adapter, adapter)

    @property
    def _live_worker(self) -> Worker:
        if self._died_of is not None or self._worker is None:
            raise EngineDiedError("The worker is gone.") from self._died_of
        return self._worker

    async def shutdown(self) -> None:
        """Let the step that runs end, drop those that wait, and join the thread."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await self._on_thread(worker.shutdown)
        self._thread.shutdown(cancel_futures=True)

    def _on_thread(self, call: Callable[..., T], *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _start(self) -> WorkerInfo:
        self._worker = self._worker_factory(self._config)
        return self._worker.start()

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        worker = self._live_worker
        try:
            return worker.execute(plan)
        except Exception as error:
            self._died_of = error
            raise EngineDiedError(f"The worker failed: {type(error).__name__}: {error}") from error

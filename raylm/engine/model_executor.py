"""ModelExecutor: how an EngineCore drives its workers; this module holds the interface and the in-process member."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from raylm.config import Config
from raylm.errors import EngineDiedError
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.worker import Worker

T = TypeVar("T")
_Result = tuple[asyncio.Future[ModelRunnerOutput], ModelRunnerOutput | BaseException]


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
    """One worker on one thread of this process; a single thread is what keeps the steps in order.

    Loop and worker share the interpreter. So where a step waits behind one that has ended, its result is told as the
    next forward pass begins: what the loop makes of it, 0.5 ms for one sequence, would else hold up the worker. That is
    where steps say when they compute, as this one did; other results are told at once.
    """

    def __init__(self, config: Config, worker_factory: Callable[[Config], Worker] = Worker) -> None:
        self._config = config
        self._worker_factory = worker_factory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylm-worker")
        self._worker: Worker | None = None
        self._died_of: Exception | None = None
        self._handed_over, self._begun = 0, 0  # steps; written by the loop's thread, and by the worker's
        self._untold: list[_Result] = []
        self._said_when = False

    async def start(self) -> WorkerInfo:
        return await self._on_thread(self._start)

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        result = asyncio.get_running_loop().create_future()
        self._handed_over += 1
        self._thread.submit(self._execute, plan, result)
        return result

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
        self._worker.when_computing = self._computes
        return self._worker.start()

    def _execute(self, plan: SchedulerOutput, result: asyncio.Future[ModelRunnerOutput]) -> None:
        self._begun += 1
        self._said_when = False
        if not result.cancelled():
            output: ModelRunnerOutput | BaseException
            try:
                output = self._run(plan)
            except BaseException as error:  # nobody else would tell
                output = error
            self._untold.append((result, output))
        if self._begun == self._handed_over or not self._said_when:
            self._tell()

    def _computes(self) -> None:
        self._said_when = True
        self._tell()

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        worker = self._live_worker
        try:
            return worker.execute(plan)
        except Exception as error:
            self._died_of = error
            raise EngineDiedError(f"The worker failed: {type(error).__name__}: {error}") from error

    def _tell(self) -> None:
        """On the worker's thread."""
        if self._untold:
            told, self._untold = self._untold, []
            with suppress(RuntimeError):  # the loop is closed
                told[0][0].get_loop().call_soon_threadsafe(_resolve, told)


def _resolve(results: list[_Result]) -> None:
    for result, output in results:
        if result.done():  # nobody waits for it any more
            continue
        if isinstance(output, BaseException):
            result.set_exception(output)
        else:
            result.set_result(output)

"""ModelExecutor: the interface by which an EngineCore drives its workers. LocalExecutor: a worker in this process."""

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

    Workers run steps strictly in the order of the ``execute`` calls. A step may be submitted before the previous step
    has returned. EngineDiedError means that a worker is lost; every later step fails too. ``on_lost``, set before the
    start, is called when a worker is lost, also when no step is in flight.
    """

    on_lost: Callable[[EngineDiedError], None] = staticmethod(lambda _: None)

    @abstractmethod
    async def start(self) -> WorkerInfo:
        """Load the weights, profile the memory and allocate the KV pool.

        Raises:
            ConfigError: the model cannot be served with this configuration.
        """

    @abstractmethod
    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        """Submit one step to the workers immediately. The awaitable returns the result of the output rank."""

    @abstractmethod
    async def prepare_grammar(self, grammar: str) -> None:
        """Compile a grammar in the workers while steps run. Returns when the grammar is compiled."""

    @abstractmethod
    async def load_adapter(self, adapter: int, path: str) -> str:
        """Load a LoRA adapter under the number ``adapter``. Steps continue meanwhile if the executor allows it.

        Returns the digest of the adapter's content.

        Raises:
            InvalidRequestError: the adapter does not fit the model or the configuration.
        """

    @abstractmethod
    async def unload_adapter(self, adapter: int) -> None:
        """Unload an adapter. No step in flight may use it."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop the workers. Safe to call twice and after a failed start."""


class LocalExecutor(ModelExecutor):
    """Runs one worker on a single thread of this process, which keeps the steps in order.

    The event loop and the worker share the interpreter lock. The loop needs about 0.5 ms to handle the result of one
    sequence, and the worker would wait for it. Therefore, when another step is queued and steps announce the start of
    their forward pass (``when_computing``), a result is delivered at the start of the next forward pass. Otherwise a
    result is delivered at once.
    """

    def __init__(self, config: Config, worker_factory: Callable[[Config], Worker] = Worker) -> None:
        self._config = config
        self._worker_factory = worker_factory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylm-worker")
        self._worker: Worker | None = None
        self._died_of: Exception | None = None
        self._handed_over, self._begun = 0, 0  # numbers of steps: written by the loop's thread, by the worker's thread
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
        """Wait for the running step, drop the queued steps, and join the thread."""
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
            except BaseException as error:  # the future is the only way to report it
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
        """Deliver the finished results to the event loop. Called on the worker's thread."""
        if self._untold:
            told, self._untold = self._untold, []
            with suppress(RuntimeError):  # the loop is closed
                told[0][0].get_loop().call_soon_threadsafe(_resolve, told)


def _resolve(results: list[_Result]) -> None:
    for result, output in results:
        if result.done():  # cancelled: its caller has stopped waiting
            continue
        if isinstance(output, BaseException):
            result.set_exception(output)
        else:
            result.set_result(output)

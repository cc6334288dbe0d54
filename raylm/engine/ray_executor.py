"""RayExecutor: workers as Ray actors, one process and one device each; steps go over a Link or as Ray calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from raylm.config import Config, EngineConfig
from raylm.engine.link import SILENCE_S
from raylm.engine.model_executor import ModelExecutor
from raylm.engine.steps import StepFailure, StepLink, StepServer
from raylm.errors import EngineCrashedError, EngineDiedError, RayLMError
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.stages import LogSource, configure_logs
from raylm.worker import LOOPBACK, Worker

T = TypeVar("T")

_NICENESS = 5  # of a worker on CPUs: the processes that deliver its tokens share its cores and run first


def prepare_process() -> None:
    """Set what OpenMP reads once, when torch is imported; must run before that.

    Idle OpenMP threads that spin starve every other process of a small machine. Ray presets one thread for an actor
    that reserves less than a CPU; the worker sets its number itself.
    """
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.pop("OMP_NUM_THREADS", None)


def lower_priority(niceness: int) -> None:
    """Of all threads of this process. Linux keeps it for each thread, and a new thread inherits it."""
    threads = os.listdir("/proc/self/task") if os.path.exists("/proc/self/task") else [0]
    for thread in threads:
        with suppress(OSError):  # it has just ended, or is nicer than that and may not go back
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


class Turns:
    """Lets steps compute one after the other, in the order of their numbers, whichever thread brings them."""

    def __init__(self) -> None:
        self._next = 1
        self._changed = threading.Condition()

    @contextmanager
    def wait_for(self, step: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._next == step)
        try:
            yield
        finally:
            with self._changed:
                self._next = step + 1
                self._changed.notify_all()


class WorkerActor(Worker):
    """One rank in a process of its own.

    An EngineCore on the same node hands it steps over a Link. Otherwise they are Ray's calls on several threads: while
    one step computes, the next one waits unpacked, and the result of the last one is being packed.
    """

    def __init__(self, config: Config, rank: int = 0, source: LogSource | None = None) -> None:
        configure_logs(config.log_format, source or LogSource("worker"))
        prepare_process()
        super().__init__(config, rank)
        self._turns = Turns()
        self._overlapped = False

    def start(self, meeting: str = "", address: str = LOOPBACK) -> WorkerInfo:
        info = super().start(meeting, address)
        self._overlapped = info.device != "cpu"
        if info.device == "cpu":
            lower_priority(_NICENESS)
        return info

    def address(self) -> str:
        """Of this node, at which other nodes reach it."""
        return str(ray.util.get_node_ip_address())

    def open_link(self, node_id: str) -> str | None:
        """Where this worker takes steps from an EngineCore on that node; None if it is another node than its own."""
        if node_id != ray.get_runtime_context().get_node_id():
            return None
        return StepServer(self.launch, lambda: self._overlapped).path

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; the next one has its turn once this one is on its way."""
        with self._turns.wait_for(plan.step):
            output = self.launch(plan)
        return output()


def worker_name(engine: EngineConfig, rank: int) -> str:
    """Its name in the log and in messages."""
    stage, rank = divmod(rank, engine.tensor_parallel_size)
    parts = [f"rank {rank}"] if engine.tensor_parallel_size > 1 else []
    parts += [f"stage {stage}"] if engine.pipeline_parallel_size > 1 else []
    return " of ".join(["worker", *parts])


def worker_threads(config: Config) -> int:
    """One for each step in flight, one packs a result, one loads adapters, one compiles grammars."""
    return config.steps_in_flight + 3


def create_worker(config: Config, rank: int = 0, engine: tuple[str, str] = ("", ""), **options: Any) -> ActorHandle:
    """Start one worker process, which is never restarted, as its state is lost.

    ``engine`` are the names of its application and engine in the log; ``options`` are Ray's (resources, placement).
    """
    options |= {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": worker_threads(config)}
    source = LogSource(worker_name(config.engine, rank), *engine)
    return ray.remote(WorkerActor).options(**options).remote(config, rank, source)


class RayExecutor(ModelExecutor):
    """Drives the worker actor that the supervisor created, so that it starts beside the EngineCore and not after it.

    ``on_pids`` gets the processes of the workers on this node as soon as they run.
    """

    def __init__(
        self,
        workers: list[ActorHandle],
        on_pids: Callable[[list[int]], None] | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        self._workers = workers
        self._on_pids = on_pids
        self._engine = engine or EngineConfig(tensor_parallel_size=len(workers))
        self._links: list[StepLink] = []
        self._senders: list[SendStep] = []

    async def start(self) -> WorkerInfo:
        await self._connect()
        info = await self._start_workers()
        for link in self._links:
            link.link.set_limit(SILENCE_S)
        return info

    async def _start_workers(self) -> WorkerInfo:
        info: WorkerInfo = await answer(self._workers[0].start.remote())
        return info

    async def _connect(self) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        paths = await answer(asyncio.gather(*(worker.open_link.remote(node_id) for worker in self._workers)))
        for rank, (worker, path) in enumerate(zip(self._workers, paths, strict=True)):
            if path is None:
                self._senders.append(worker.execute.remote)
                continue
            link = StepLink(worker_name(self._engine, rank), self.on_lost)
            await link.connect(path)
            self._links.append(link)
            self._senders.append(step_sender(link))
        if self._on_pids is not None:
            self._on_pids([link.link.pid for link in self._links])

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        return answer(self._senders[0](plan))

    async def prepare_grammar(self, grammar: str) -> None:
        await answer(asyncio.gather(*(worker.prepare_grammar.remote(grammar) for worker in self._workers)))

    async def load_adapter(self, adapter: int, path: str) -> str:
        """On the one worker there is: with several, adapters are refused at the start."""
        return await answer(self._workers[0].load_adapter.remote(adapter, path))

    async def unload_adapter(self, adapter: int) -> None:
        await answer(self._workers[0].unload_adapter.remote(adapter))

    async def shutdown(self) -> None:
        for link in self._links:
            link.link.close()
        for worker in self._workers:
            ray.kill(worker)


SendStep = Callable[[SchedulerOutput], Awaitable[ModelRunnerOutput]]  # the awaitable may raise RayError


def step_sender(link: StepLink) -> SendStep:
    """Sends steps over a Link, and raises what Ray's call of ``execute`` would raise."""

    async def outcome(sent: Awaitable[ModelRunnerOutput | StepFailure]) -> ModelRunnerOutput:
        try:
            found = await sent
        except ConnectionError as error:
            raise RayActorError from error  # Ray will find out too, but later
        if isinstance(found, StepFailure):
            raise RayTaskError("execute", found.traceback, found.cause)
        return found

    return lambda plan: outcome(link.send(plan))


async def answer(call: Awaitable[T]) -> T:
    """What another actor answers; what it raises becomes a RayLMError."""
    try:
        return await call
    except RayError as error:
        raise as_raylm_error(error) from error


def as_raylm_error(error: RayError) -> RayLMError:
    """What was raised in another actor as the error it is there; everything else as EngineDiedError, in one line."""
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, RayLMError):
        return cause
    if isinstance(cause, RayError):
        return EngineDiedError("A process of the engine was lost.")
    lines = str(cause).strip().splitlines()
    return EngineCrashedError(f"{type(cause).__name__}: {lines[-1] if lines else 'no message'}")

"""ParallelExecutor: runs the workers of one model as Ray actors. If a worker fails, it reports the root cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from ray.exceptions import RayActorError, RayError

from raylm.config import EngineConfig
from raylm.engine.link import SILENCE_S
from raylm.engine.ray_executor import RayExecutor, answer, as_raylm_error, worker_name
from raylm.errors import EngineDiedError, PeerLostError
from raylm.messages import ModelRunnerOutput, SchedulerOutput, StageInfo, WorkerInfo

T = TypeVar("T")

_LAST_WORDS_S = 1.0
"""After a rank's own error, the time in which Ray or a Link may say that its process was lost."""
_CAUSE_S = 2 * SILENCE_S
"""After a rank has lost another, the time to wait for the reason. A process that stopped is noticed in that time."""


class ParallelExecutor(RayExecutor):
    """The workers compute each step together: the ranks of a stage at once, the stages one after the other.

    The first rank of the last stage returns the result. The failure of any worker ends the engine. The others then hang
    in an operation between workers, or fail with an error that does not name the failed worker. Therefore the errors of
    all workers are compared, and the root cause is raised.
    """

    async def _start_workers(self) -> WorkerInfo:
        """They meet at a file on one node, else at a port of the first worker's node."""
        on_one_node = len(self._links) == len(self._workers)
        calls = [] if on_one_node else [worker.address.remote() for worker in self._workers]
        addresses = [[str(found)] for found in await answer(asyncio.gather(*calls))] or [[] for _ in self._workers]
        meeting: str = await answer(self._workers[0].open_rendezvous.remote(*addresses[0]))
        placed = zip(self._workers, addresses, strict=True)
        starts = [worker.start.remote(meeting, *address) for worker, address in placed]
        infos: list[WorkerInfo] = await self._all(starts)
        stages = [StageInfo(*info.layers, info.weights_bytes) for info in infos if info.layers]
        return replace(infos[self._output], pipeline=stages[:: self._engine.tensor_parallel_size])

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        return self._result([send(plan) for send in self._senders])

    @property
    def _output(self) -> int:
        """The number of the worker that draws."""
        return len(self._workers) - self._engine.tensor_parallel_size

    async def _result(self, refs: Sequence[Awaitable[T]]) -> T:
        return (await self._all(refs))[self._output]

    async def _all(self, refs: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for all workers. If a worker fails, raise the root cause."""
        futures = [asyncio.ensure_future(ref) for ref in refs]
        try:
            return await asyncio.gather(*futures)
        except RayError:
            await _raise_cause(futures, self._engine)


async def _raise_cause(futures: Sequence[asyncio.Future[Any]], engine: EngineConfig) -> NoReturn:
    began = time.monotonic()
    while True:
        rank, error = min(_failed(futures).items(), key=lambda item: _distance(item[1]))
        pending = [future for future in futures if not future.done()]
        left_s = began + (0, _LAST_WORDS_S, _CAUSE_S)[_distance(error)] - time.monotonic()
        if not pending or left_s <= 0:
            break
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    if isinstance(error, RayActorError):
        raise EngineDiedError(f"The {worker_name(engine, rank)} was lost.") from error
    assert isinstance(error, RayError)
    raise as_raylm_error(error) from error


def _failed(futures: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """The errors so far, by rank."""
    done = [(rank, future) for rank, future in enumerate(futures) if future.done() and not future.cancelled()]
    return {rank: error for rank, future in done if (error := future.exception())}


def _distance(error: BaseException) -> int:
    """Distance of an error from the root cause: 0 for a lost process, 1 for a rank's own error, 2 for a lost peer."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if isinstance(getattr(error, "cause", None), PeerLostError) else 1

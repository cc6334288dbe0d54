"""TensorParallelExecutor: runs the ranks of one model as Ray actors. If a rank fails, it reports the root cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn, TypeVar

from ray.exceptions import RayActorError, RayError

from raylm.engine.ray_executor import RayExecutor, answer, as_raylm_error
from raylm.errors import EngineDiedError, PeerLostError
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo

T = TypeVar("T")

_LAST_WORDS_S = 1.0  # time to wait for errors of the other ranks after one has failed


class TensorParallelExecutor(RayExecutor):
    """The ranks compute each step together. Rank 0 returns the result; the failure of any rank ends the engine.

    When a rank fails, the others hang in a collective operation, or fail with an error that does not name the failed
    rank. Therefore the errors of all ranks are compared, and the root cause is raised.
    """

    async def _start_workers(self) -> WorkerInfo:
        meeting: str = await answer(self._workers[0].open_rendezvous.remote())
        info: WorkerInfo = await _first([worker.start.remote(meeting) for worker in self._workers])
        return info

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        return _first([send(plan) for send in self._senders])


async def _first(refs: Sequence[Awaitable[T]]) -> T:
    """Wait for all ranks and return the result of rank 0. If a rank fails, raise the root cause."""
    futures = [asyncio.ensure_future(ref) for ref in refs]
    try:
        return (await asyncio.gather(*futures))[0]
    except RayError:
        await _raise_cause(futures)


async def _raise_cause(futures: Sequence[asyncio.Future[Any]]) -> NoReturn:
    deadline = time.monotonic() + _LAST_WORDS_S
    while True:
        rank, error = min(_failed(futures).items(), key=lambda item: _distance(item[1]))
        pending, left_s = [future for future in futures if not future.done()], deadline - time.monotonic()
        if not _distance(error) or not pending or left_s <= 0:
            break
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    if isinstance(error, RayActorError):
        raise EngineDiedError(f"The worker of rank {rank} was lost.") from error
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

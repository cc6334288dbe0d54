"""Callers: ends the handle calls of dead processes. Neither Ray nor Serve reports a caller's death to a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray
from ray import ObjectRef

from raylm.frontend import ClientDisconnectedError, Request
from raylm.stages import about

logger = logging.getLogger("raylm.ingress")

_PERIOD_S = 1.0
_TIMEOUT_MS = 1000


def _answers(ref: ObjectRef) -> bool:
    """Whether the owner of an object answers a question for its location.

    A process that does not answer in time counts as alive.
    """
    try:
        # One object per call: Ray 2.60 aborts this process if it is asked for objects of several owners.
        return ref in ray.experimental.get_object_locations([ref], timeout_ms=_TIMEOUT_MS)
    except ray.exceptions.GetTimeoutError:
        return True


class Callers:
    """The running requests of each caller. An ObjectRef that the caller owns identifies the caller.

    A caller that is dead in two checks in a row is gone, and its requests are interrupted. ``answers`` may block.
    """

    def __init__(self, answers: Callable[[ObjectRef], bool] = _answers, period_s: float = _PERIOD_S) -> None:
        self._answers = answers
        self._period_s = period_s
        self._requests: dict[ObjectRef, set[Request]] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, caller: ObjectRef, request: Request) -> Iterator[None]:
        """Interrupt ``request`` if ``caller`` is gone before the end of the block."""
        self._requests.setdefault(caller, set()).add(request)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._interrupt_orphans(), name="callers")
        try:
            yield
        finally:
            self._requests[caller].remove(request)
            if not self._requests[caller]:
                del self._requests[caller]

    async def _interrupt_orphans(self) -> None:
        missed: set[ObjectRef] = set()
        while self._requests:
            await asyncio.sleep(self._period_s)
            asked = list(self._requests)
            try:
                missing = await asyncio.to_thread(self._silent, asked)
            except Exception as error:
                logger.warning("could not check whether callers by handle are alive: %s", error, extra=about("callers"))
                continue
            for caller in missing & missed:
                for request in self._requests.get(caller, ()):
                    request.interrupt(ClientDisconnectedError())
            missed = missing

    def _silent(self, asked: Sequence[ObjectRef]) -> set[ObjectRef]:
        return {caller for caller in asked if not self._answers(caller)}

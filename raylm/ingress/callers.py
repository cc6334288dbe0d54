"""Callers: ends the handle calls of processes that are gone, which neither Ray nor Serve tells a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import ray
from ray import ObjectRef

from raylm.frontend import ClientDisconnectedError, OngoingRequest

logger = logging.getLogger("raylm.ingress")

_PERIOD_S = 1.0
_TIMEOUT_MS = 5000


def _answered(refs: Sequence[ObjectRef]) -> Collection[ObjectRef]:
    """Those of ``refs`` whose owner says where the object is; a dead process answers for none of its objects."""
    found: dict[ObjectRef, object] = ray.experimental.get_object_locations(list(refs), timeout_ms=_TIMEOUT_MS)
    return found


class Callers:
    """The running requests of each caller, a process that is known by an object that it owns.

    One whose object is not found twice in a row is gone, and its requests are interrupted. ``answered`` blocks.
    """

    def __init__(
        self, answered: Callable[[Sequence[ObjectRef]], Collection[ObjectRef]] = _answered, period_s: float = _PERIOD_S
    ) -> None:
        self._answered = answered
        self._period_s = period_s
        self._requests: dict[ObjectRef, set[OngoingRequest]] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, caller: ObjectRef) -> Iterator[OngoingRequest]:
        """One request of ``caller``, until the end of the block."""
        ongoing = OngoingRequest()
        self._requests.setdefault(caller, set()).add(ongoing)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._interrupt_orphans(), name="callers")
        try:
            yield ongoing
        finally:
            self._requests[caller].remove(ongoing)
            if not self._requests[caller]:
                del self._requests[caller]

    async def _interrupt_orphans(self) -> None:
        missed: set[ObjectRef] = set()
        while self._requests:
            await asyncio.sleep(self._period_s)
            asked = list(self._requests)
            try:
                missing = set(asked).difference(await asyncio.to_thread(self._answered, asked))
            except Exception as error:
                logger.warning("it is not known whether callers by handle are alive: %s", error)
                continue
            for caller in missing & missed:
                for ongoing in self._requests.get(caller, ()):
                    ongoing.interrupt(ClientDisconnectedError())
            missed = missing

"""Lifecycle: which requests an ingress replica holds at this moment, how many it takes, and how they end in order."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any

from raylm.errors import OverloadedError, ShuttingDownError

_FAREWELL_S = 1.0


class ClientDisconnectedError(Exception):
    """The client hung up; nobody reads the answer any more."""


class OngoingRequest:
    """One admitted request: while its task is inside ``with ongoing:`` it can be interrupted for a stated reason.

    The reason is raised out of the block in place of the cancellation, in the manner of asyncio.timeout, so that a
    cancellation from outside (the server ends the task) is never mistaken for it.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._reason: Exception | None = None
        self._cancelling = 0

    def interrupt(self, reason: Exception) -> None:
        """End the block with ``reason``, now or when it is entered; only the first reason counts."""
        if self._reason is None:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> OngoingRequest:
        if self._reason is not None:
            raise self._reason
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._reason is None or task is None:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None


class Lifecycle:
    """Admits requests up to a bound and drains them at shutdown; the owner of ``shutting_down``."""

    def __init__(self, max_ongoing_requests: int) -> None:
        self.shutting_down = False
        self._max_ongoing_requests = max_ongoing_requests
        self._ongoing: set[OngoingRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_ongoing(self) -> int:
        """Requests admitted and not yet answered to the end."""
        return len(self._ongoing)

    def admit(self) -> OngoingRequest:
        """Take in one request; the caller must ``release`` it.

        Raises:
            ShuttingDownError: ``drain`` was called.
            OverloadedError: the replica holds as many as it may.
        """
        if self.shutting_down:
            raise ShuttingDownError("The server is shutting down.")
        if len(self._ongoing) >= self._max_ongoing_requests:
            raise OverloadedError("The server holds as many requests as it can; try again shortly.")
        ongoing = OngoingRequest()
        self._ongoing.add(ongoing)
        self._idle.clear()
        return ongoing

    def release(self, ongoing: OngoingRequest) -> None:
        """Forget a request that ``admit`` returned."""
        self._ongoing.discard(ongoing)
        if not self._ongoing:
            self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on, give running ones ``grace_s`` seconds, then end them with an error."""
        self.shutting_down = True
        await self._until_idle(grace_s)
        for ongoing in tuple(self._ongoing):
            ongoing.interrupt(ShuttingDownError("The server is shutting down and could not finish this request."))
        await self._until_idle(_FAREWELL_S)

    async def _until_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

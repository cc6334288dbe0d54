"""Which requests an ingress replica works on: Throttle paces them, Lifecycle bounds them and ends them in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from raylm.errors import OverloadedError, ShuttingDownError

PER_TURN = 8  # each then takes a part of a millisecond to be read, checked and rendered, or refused
_ERROR_TIMEOUT_S = 1.0
_FULL = "The server holds as many requests as it can; try again shortly."


class Throttle:
    """Lets a few requests pass in each turn of the event loop, first come, first served."""

    def __init__(self) -> None:
        self._left = PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._left == PER_TURN:
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        passing = loop.create_future()
        self._waiting.append(passing)
        await passing

    def _turn(self) -> None:
        self._left = PER_TURN
        while self._waiting and self._left:
            passing = self._waiting.popleft()
            if not passing.done():
                passing.set_result(None)
                self._left -= 1
        if self._left < PER_TURN:
            asyncio.get_running_loop().call_soon(self._turn)


class ClientDisconnectedError(Exception):
    """There is no client to answer any more."""


class OngoingRequest:
    """One admitted request: while its task is inside ``with ongoing:`` it can be interrupted for a stated reason.

    In the manner of asyncio.timeout the block raises the reason in place of the cancellation; one from outside stays.
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
    """Admits requests up to a bound and drains them at shutdown; the owner of ``shutting_down``.

    A request whose body is still coming is drained with the others, and does not count for the bound.
    """

    def __init__(self, max_ongoing_requests: int) -> None:
        self.shutting_down = False
        self._max_ongoing_requests = max_ongoing_requests
        self._ongoing: set[OngoingRequest] = set()
        self._num_receiving = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_ongoing(self) -> int:
        return len(self._ongoing) - self._num_receiving

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While an admitted request receives its body it does not count; it is refused if there is no place then."""
        self._num_receiving += 1
        try:
            yield
            if self.num_ongoing >= self._max_ongoing_requests:
                raise OverloadedError(_FULL)
        finally:
            self._num_receiving -= 1

    @contextmanager
    def admit(self, ongoing: OngoingRequest | None = None) -> Iterator[OngoingRequest]:
        """Hold one request until the end of the block, or refuse it."""
        if self.shutting_down:
            raise ShuttingDownError("The server is shutting down.")
        if self.num_ongoing >= self._max_ongoing_requests:
            raise OverloadedError(_FULL)
        ongoing = ongoing or OngoingRequest()
        self._ongoing.add(ongoing)
        self._idle.clear()
        try:
            yield ongoing
        finally:
            self._ongoing.remove(ongoing)
            if not self._ongoing:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on, give running ones ``grace_s`` seconds, then end them with an error."""
        self.shutting_down = True
        await self._until_idle(grace_s)
        for ongoing in tuple(self._ongoing):
            ongoing.interrupt(ShuttingDownError("The server is shutting down and could not finish this request."))
        await self._until_idle(_ERROR_TIMEOUT_S)

    async def _until_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

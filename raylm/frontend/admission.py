"""What a replica lets in: Throttle by turns of its event loop, Lifecycle by its places, Admission by what waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol

from raylm.errors import OverloadedError, ShuttingDownError

PER_TURN = 8  # each then takes a part of a millisecond to be read, checked and rendered, or refused
_ERROR_TIMEOUT_S = 1.0
_FULL = "The server holds as many requests as it can; try again shortly."
_INITIAL_TOKENS_PER_BYTE = 0.25  # of English text; what comes in corrects it
_MIN_RATIO, _MAX_RATIO = 1 / 64, 1.0
_MEMORY_BYTES = 1_000_000  # of bodies whose ratio is remembered
_MAX_RETRY_S = 60
_RATE_SAMPLES = 64
_PARTS = 4  # one request has at most the fourth part of the queue at once


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

    A request whose body is still coming is drained with the others, and does not count for the bound; nor does a
    connection whose request outlives it.
    """

    def __init__(self, max_ongoing_requests: int) -> None:
        self.shutting_down = False
        self._max_ongoing_requests = max_ongoing_requests
        self._ongoing: set[OngoingRequest] = set()
        self._outlived: set[OngoingRequest] = set()
        self._num_receiving = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_ongoing(self) -> int:
        return len(self._ongoing) - len(self._outlived) - self._num_receiving

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
        with self._hold(ongoing or OngoingRequest()) as held:
            yield held

    @contextmanager
    def succeed(self, connection: OngoingRequest) -> Iterator[OngoingRequest]:
        """Hold a request in the place of its ``connection``, which is still drained but counts no more."""
        if connection in self._ongoing:
            self._outlived.add(connection)
        with self._hold(OngoingRequest()) as held:
            yield held

    @contextmanager
    def _hold(self, ongoing: OngoingRequest) -> Iterator[OngoingRequest]:
        self._ongoing.add(ongoing)
        self._idle.clear()
        try:
            yield ongoing
        finally:
            self._ongoing.remove(ongoing)
            self._outlived.discard(ongoing)
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


class QueuePolicy(Protocol):
    """How places of a finite queue are shared by keys."""

    def share(self, most: float, free: float, weight: float) -> float:
        """How many of ``most`` places a key may have, where so many are not taken by any."""
        ...


class FirstCome:
    """Whoever comes first has the place."""

    def share(self, most: float, free: float, weight: float) -> float:
        return most


class FairShares:
    """A key may have as many places as are free, times its weight (the dynamic thresholds of shared-memory switches).

    So alone it fills half of the queue, two a third each, and there is always room for one that comes. The only key
    that there is may fill it whole.
    """

    def __init__(self, num_keys: Callable[[], int]) -> None:
        self._num_keys = num_keys

    def share(self, most: float, free: float, weight: float) -> float:
        return weight * free if self._num_keys() > 1 else most


class Admission:
    """Counts the sequences that wait for their first token, and their prompt tokens; without bounds it only counts.

    What is being received, rendered or tokenized counts by an estimate from its bytes, and by its tokens once they
    are known. A request that finds no other one of its key waiting is let in whatever its size and however many wait
    of other keys: so none can turn another away. What a key may have beyond that the ``policy`` says. Of one request
    the prompts that are ``at_once`` wait; the others are to come when these have begun.
    All methods may raise OverloadedError, which says when to come back.
    """

    def __init__(
        self,
        max_requests: float = math.inf,
        max_tokens: float = math.inf,
        policy: QueuePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.requests = 0
        self.tokens = 0
        self.policy = policy or FirstCome()
        self._requests_of: Counter[str] = Counter()  # by key's name
        self._tokens_of: Counter[str] = Counter()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._seen_bytes = _INITIAL_TOKENS_PER_BYTE**-1
        self._seen_tokens = 1.0
        self._begun: deque[float] = deque(maxlen=_RATE_SAMPLES)  # when the last sequences got their first token

    def at_once(self, num_sequences: int) -> float:
        """How many prompts of one request, of so many sequences each, may wait at once."""
        return max(1.0, self._max_requests // _PARTS // num_sequences)

    def check(self, num_bytes: int, key: str = "", weight: float = 1.0) -> None:
        """Refuse a prompt of so many bytes before work is done on it."""
        self._check(1, self._estimate(num_bytes), Reservation(self, key, weight))

    def enter(self, num_bytes: int, key: str = "", weight: float = 1.0) -> Reservation:
        """Let in a request of a key that is not read yet; the caller releases it in the end."""
        reservation = Reservation(self, key, weight)
        reservation.grow(1, num_bytes)
        return reservation

    def prompt(self, num_tokens: int, num_sequences: int, request: Reservation | None = None) -> Reservation:
        """Let a tokenized prompt wait for the first tokens of its sequences.

        As a part of a ``request`` that was let in it takes over that one's estimate; else it may be refused.
        """
        reservation = Reservation(self, request.key, request.weight) if request is not None else Reservation(self)
        if request is None or request.released:
            self._check(num_sequences, num_tokens, reservation)
        elif num_bytes := request.give(num_sequences):
            keep = _MEMORY_BYTES / (_MEMORY_BYTES + num_bytes)
            self._seen_bytes = keep * self._seen_bytes + num_bytes
            self._seen_tokens = keep * self._seen_tokens + num_tokens
        reservation.set(num_sequences, num_tokens)
        return reservation

    def _check(self, requests: int, tokens: int, own: Reservation) -> None:
        mine = self._requests_of[own.key] - own.requests
        if mine and not (
            self._has_room(mine, self.requests - own.requests, requests, self._max_requests, own.weight)
            and self._has_room(
                self._tokens_of[own.key] - own.tokens, self.tokens - own.tokens, tokens, self._max_tokens, own.weight
            )
        ):
            message = "The server has as many requests waiting as it takes; try again shortly."
            raise OverloadedError(message, retry_after_s=self._retry_after_s())

    def _has_room(self, mine: int, others: int, more: int, most: float, weight: float) -> bool:
        """``mine`` and ``others`` are what waits without the ``more`` that is asked for."""
        return mine + more <= self.policy.share(most, most - others, weight) and others + more <= most

    def _estimate(self, num_bytes: int) -> int:
        ratio = self._seen_tokens / self._seen_bytes
        return math.ceil(num_bytes * min(max(ratio, _MIN_RATIO), _MAX_RATIO))

    def _count(self, key: str, requests: int, tokens: int) -> None:
        self._requests_of[key] += requests
        self._tokens_of[key] += tokens
        if not self._requests_of[key] and not self._tokens_of[key]:
            del self._requests_of[key], self._tokens_of[key]

    def _retry_after_s(self) -> int:
        """Until what waits now has its first tokens, at the pace of the last ones that got theirs."""
        if len(self._begun) < 2:
            return 1
        rate = len(self._begun) / max(self.clock() - self._begun[0], 1e-3)
        return min(max(math.ceil(self.requests / rate), 1), _MAX_RETRY_S)


class Reservation:
    """What one request of a key, or one prompt of it, counts for in the queue at this moment."""

    __slots__ = ("_admission", "_bytes", "_started", "key", "released", "requests", "tokens", "weight")

    def __init__(self, admission: Admission, key: str = "", weight: float = 1.0) -> None:
        self.requests = 0
        self.tokens = 0
        self.key = key
        self.weight = weight
        self.released = False
        self._admission = admission
        self._bytes = 0
        self._started: set[int] = set()

    def set(self, requests: int, tokens: int) -> None:
        self._admission.requests += requests - self.requests
        self._admission.tokens += tokens - self.tokens
        self._admission._count(self.key, requests - self.requests, tokens - self.tokens)
        self.requests, self.tokens = requests, tokens
        if not self._admission.requests:
            self._admission._begun.clear()  # the pace so far says nothing about the requests to come

    def grow(self, requests: int, num_bytes: int) -> None:
        """Count for more than it was let in for; if that is refused, it counts for what it did."""
        requests, self._bytes = max(requests, self.requests), max(num_bytes, self._bytes)
        tokens = self._admission._estimate(self._bytes)
        self._admission._check(requests, tokens, self)
        self.set(requests, tokens)

    def expect(self, prompts: int, num_sequences: int) -> None:
        """It turns out to have so many prompts, of so many sequences each, and counts for those that wait at once."""
        waiting = int(min(prompts, self._admission.at_once(num_sequences)))
        self._bytes = self._bytes * waiting // prompts
        self.set(self.requests, self._admission._estimate(self._bytes))
        self.grow(waiting * num_sequences, 0)

    def give(self, requests: int) -> int:
        """Hand over the share of so many sequences; returns the bytes that they were estimated from."""
        share = min(1.0, requests / self.requests) if self.requests else 0.0
        given = round(share * self._bytes)
        self._bytes -= given
        self.set(max(0, self.requests - requests), round(self.tokens * (1 - share)))
        return given

    def begin(self, indexes: Iterable[int]) -> None:
        """These sequences have their first token: they, and the prompt that all share, wait no more."""
        fresh = set(indexes) - self._started
        self._started |= fresh
        self._admission._begun.extend([self._admission.clock()] * len(fresh))
        self.set(max(0, self.requests - len(fresh)), 0)

    def release(self) -> None:
        """It waits no more; what prompts of its request are still to come wait by themselves."""
        self.released = True
        self.set(0, 0)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

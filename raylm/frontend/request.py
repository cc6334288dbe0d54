"""Request: what one caller asked; it owns everything it has taken, and ends once. Requests: those of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import Token
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raylm.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from raylm.frontend.admission import Admission, Reservation, Throttle
from raylm.frontend.state.messages import NO_LIMITS, KeyLimits
from raylm.frontend.timelines.record import CURRENT, Record, Trace
from raylm.frontend.timelines.ring import Timelines
from raylm.messages import ServiceLevel

if TYPE_CHECKING:
    from raylm.frontend.state.client import Hold, StateClient
    from raylm.messages import EngineCoreRequest

T = TypeVar("T")

Told = Sequence[int | None] | None
"""Number of tokens of each sequence that an earlier connection delivered (None: all of them).

() if it delivered none. None in place of the sequence for a new request.
"""

_ERROR_TIMEOUT_S = 1.0
_FULL = "The server holds as many requests as it can; try again shortly."


class ClientDisconnectedError(Exception):
    """There is no client to answer any more."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The name and rights of an API key, without the key itself.

    Keys get shares in proportion to ``weight``. ``max_output`` is the longest answer in tokens. An ``admin`` may load
    and unload adapters, and sees and ends the requests of all keys. ``ttft_s`` and ``itl_s`` are the latency targets,
    in seconds, of requests that state none. With ``own_prefixes`` this key shares no cached prefix with other keys.
    """

    name: str
    weight: float = 1.0
    limits: KeyLimits = NO_LIMITS
    max_output: int | None = None
    admin: bool = True
    ttft_s: float | None = None
    itl_s: float | None = None
    own_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came: the id and the path of its timeline, its API key, and the caller's span (W3C).

    ``is_job``: an ingress that is gone had let the request in. Its timeline begins when this replica has let it in too,
    since a job that is refused is tried again every few seconds.
    """

    request_id: str
    path: str
    key: ApiKey | None = None
    trace: Trace = None
    is_job: bool = False

    @property
    def key_name(self) -> str:
        """The name of the key, "" without one."""
        return "" if self.key is None else self.key.name


class _Work:
    """What one task does for a request. ``interrupt`` ends the block with a reason.

    As asyncio.timeout does, the block raises the reason in place of CancelledError. A cancellation from elsewhere stays
    a CancelledError. Inside the block the log lines of the task carry the id of the request.
    """

    __slots__ = ("_cancelled", "_cancelling", "_reason", "_record", "_task", "_token")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._task: asyncio.Task[Any] | None = None
        self._reason: Exception | None = None
        self._cancelled = False  # by ``interrupt``, so that the block takes this cancellation back
        self._cancelling = 0
        self._token: Token[Record | None]

    def interrupt(self, reason: Exception) -> None:
        """End the block with ``reason``, now or when it is entered. Later reasons are ignored."""
        if self._reason is None:
            self._reason = reason
            if self._task is not None and self._task is not asyncio.current_task():
                self._cancelled = True
                self._task.cancel()
        if self._task is not None and self._task is asyncio.current_task():
            raise self._reason

    def __enter__(self) -> None:
        if self._reason is not None:
            raise self._reason
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        self._token = CURRENT.set(self._record)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        CURRENT.reset(self._token)
        if self._reason is None or task is None or not self._cancelled:
            return
        self._cancelled = False
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None


class Request:
    """What one caller asked, from the head of its message to its end.

    A Request owns everything it has taken: its place in the replica, its room in the queue, its share of the key's
    limits, and its timeline (``record``). ``end`` gives all of it back, once. No account awaits or raises when it ends.
    The caller has a connection. A request that is ``kept`` outlives it: the job that continues the request ends it.
    """

    def __init__(
        self, arrival: Arrival, timelines: Timelines, queue: Admission, state: StateClient | None = None
    ) -> None:
        self.arrival = arrival
        self.record = Record(arrival.request_id, arrival.key_name, arrival.path, timelines.clock, arrival.trace)
        self.record.cancel = self.interrupt
        self.service = ServiceLevel()
        self.reservation: Reservation | None = None
        self.kept = False
        self._timelines = timelines
        self._queue = queue
        self._state = state
        self._owned = ExitStack()
        self._owned.callback(self._end_claims)
        self._connection = self._work = _Work(self.record)
        self._ended = False
        self._tokens: list[Hold] = []
        self._tokens_claimed = False
        self._unserved = 0  # prompts whose tokens are reserved
        self._served = 0
        self._prompts = 1
        self._prompt_tokens: int | None = None  # of all prompts, None while they are not known
        if not arrival.is_job:
            self.begin()

    @property
    def id(self) -> str:
        return self.arrival.request_id

    @property
    def key(self) -> ApiKey | None:
        return self.arrival.key

    def begin(self) -> None:
        """Begin the timeline."""
        self._timelines.begin(self.record)

    def take(self, account: AbstractContextManager[T]) -> T:
        """Enter an account, which ends with the request. Take before you await: a cancellation then gives it back."""
        return self._owned.enter_context(account)

    def interrupt(self, reason: Exception) -> None:
        """End the work on the request with ``reason``; the first reason counts.

        Raises:
            Exception: ``reason``, if the task of the request itself calls this inside ``working`` or ``connected``.
        """
        self._work.interrupt(reason)

    def hang_up(self, reason: Exception) -> None:
        """As ``interrupt``, since the client waits no longer. It ends only the connection of a request that is kept."""
        self._connection.interrupt(reason)

    def working(self) -> AbstractContextManager[None]:
        """A block of the task that works on the request. It raises the reason of ``interrupt``."""
        return self._work

    def connected(self) -> AbstractContextManager[None]:
        """A block of the task that answers the client. It raises the reason of ``hang_up``."""
        return self._connection

    def keep(self) -> None:
        """Let the request outlive its connection. A job works on it from now on, and calls ``end``."""
        self.kept = True
        self._work = _Work(self.record)

    def end(self, error: BaseException | None = None) -> None:
        """Give back everything that the request has taken, and end its timeline. Safe to repeat."""
        if self._ended:
            return
        self._ended = True
        self._owned.close()
        self._timelines.end_record(self.record, error)

    def check(self, num_bytes: int) -> None:
        """Refuse a body of ``num_bytes`` before it is read. OverloadedError if the queue has no room for it."""
        self._queue.check(num_bytes, *self._name_and_weight())

    async def claim(self, *, begins: bool = True) -> None:
        """Count as a request of its key. RateLimitError if the key has reached a limit.

        A request that another replica began counts as open alone.
        """
        if self.key is not None and self._state is not None and self.key.limits.bounds_requests:
            await self.take(self._state.claim(self.key.name, self.key.limits, begins=begins))

    def wait(self, num_bytes: int) -> None:
        """Enter the queue with a body of ``num_bytes``. OverloadedError if there is no room."""
        self.reservation = self.take(self._queue.enter(num_bytes, *self._name_and_weight()))

    def leave_queue(self) -> None:
        """Wait no longer for a first token."""
        if self.reservation is not None:
            self.reservation.release()

    def expect(self, num_prompts: int, num_sequences: int) -> None:
        """Set the number of prompts, and of sequences for each. OverloadedError if the queue has no room."""
        if self.reservation is not None:
            self.reservation.expect(num_prompts, num_sequences)

    def at_once(self, num_sequences: int) -> float:
        """How many of its prompts, of ``num_sequences`` each, may wait for their first tokens at once."""
        return self._queue.at_once(num_sequences)

    def bounded(self, request: EngineCoreRequest, max_tokens: int | None, param: str) -> EngineCoreRequest:
        """Limit the length of the answer to what the key may ask for, if the client gave no ``max_tokens``.

        ``param`` is the field of the prompt.

        Raises:
            InvalidRequestError: the client asks for more, or for more than the key's limit of tokens a minute.
        """
        if request.pooling is not None:
            return request
        most, params = self._longest_answer(request), request.params
        if most is None or params.max_tokens is None or params.max_tokens <= most:
            return request
        if most < 1:
            raise self._too_long(request, param)
        if max_tokens is not None or params.min_tokens > most:
            name = "min_tokens" if max_tokens is None and params.min_tokens > most else "max_tokens"
            which = "this prompt" if self._prompts == 1 else "each of these prompts"
            message = f"'{name}' may be at most {most} for {which}, by the limits of this API key."
            raise InvalidRequestError(message, param=name)
        return replace(request, params=replace(params, max_tokens=most))

    def expect_another(self) -> None:
        """Let the request have one more prompt, after those before have ended. Its tokens are reserved anew."""
        self._end_claims()
        self._tokens_claimed = False
        self._served, self._prompts, self._prompt_tokens = 0, 1, None

    @property
    def bounds_tokens(self) -> bool:
        """Whether the key has a limit of tokens. Then call ``claim_tokens`` before the first prompt is sent."""
        return self.key is not None and self._state is not None and self.key.limits.tokens_per_minute is not None

    async def claim_tokens(
        self, requests: Iterable[tuple[EngineCoreRequest, Told]], max_tokens: int | None, param: str
    ) -> None:
        """Reserve, in one claim, the most tokens that all prompts of the request and their answers can take.

        Tokens that an earlier connection delivered are not reserved again. ``max_tokens`` is the client's own limit.

        Raises:
            RateLimitError: the tokens exceed what is left of this minute.
            InvalidRequestError: the tokens exceed the limit of a whole minute.
        """
        if self.key is None or self._state is None or (limit := self.key.limits.tokens_per_minute) is None:
            return
        if self._tokens_claimed:
            return
        asked = list(requests)
        self._prompts = len(asked)
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request, _ in asked)
        bounded = [(self.bounded(request, max_tokens, param), told) for request, told in asked]
        tokens = sum(_most_tokens(request, told) for request, told in bounded)
        if tokens > limit:
            message = f"It takes up to {tokens:,} tokens; this API key is served {limit:,} in a minute."
            raise InvalidRequestError(message, param="max_tokens" if asked[0][0].pooling is None else "input")
        self._unserved = len(asked)
        if tokens:
            await self._take_tokens(self._state.claim(self.key.name, self.key.limits, tokens))
        self._tokens_claimed = True

    async def claim_again(self, request: EngineCoreRequest, told: Told) -> None:
        """Reserve the tokens of a request that ``claim_tokens`` left out because of ``told``: they are computed again.

        Raises:
            RateLimitError: the tokens exceed what is left of this minute.
        """
        if self.key is not None and self._state is not None and self.bounds_tokens:
            tokens = _most_tokens(request, None) - _most_tokens(request, told)
            await self._take_tokens(self._state.claim(self.key.name, self.key.limits, tokens))

    async def _take_tokens(self, hold: Hold) -> None:
        """As ``take``, of tokens: its end says how many were served."""
        self._tokens.append(hold)
        await hold

    def count_served(self, tokens: int) -> None:
        """Count the ``tokens`` served for one ended prompt. After the last prompt the unused tokens are given back."""
        self._served += tokens
        self._unserved -= 1
        if self._unserved <= 0:
            self._end_claims()

    def _end_claims(self) -> None:
        served = self._served
        while self._tokens:
            hold = self._tokens.pop()
            used = min(served, hold.claim.tokens or 0) if self._tokens else served
            hold.end(used)
            served -= used

    def _longest_answer(self, request: EngineCoreRequest) -> int | None:
        """The longest answer, in tokens of each sequence, that the key may ask for. None if unlimited."""
        key, bounds = self.key, []
        if key is not None and key.max_output is not None:
            bounds.append(key.max_output)
        if key is not None and (limit := key.limits.tokens_per_minute) is not None:
            prompts = len(request.prompt_token_ids) if self._prompt_tokens is None else self._prompt_tokens
            bounds.append((limit - prompts) // (self._prompts * request.params.n))
        return min(bounds, default=None)

    def _too_long(self, request: EngineCoreRequest, param: str) -> InvalidRequestError:
        assert self.key is not None
        tokens = len(request.prompt_token_ids) if self._prompt_tokens is None else self._prompt_tokens
        least, limit = tokens + self._prompts * request.params.n, self.key.limits.tokens_per_minute
        message = (
            f"'{param}' takes at least {least:,} tokens with its answer; this API key is served {limit:,} in a minute."
        )
        return InvalidRequestError(message, param=param)

    def _name_and_weight(self) -> tuple[str, float]:
        return ("", 1.0) if self.key is None else (self.key.name, self.key.weight)


class Requests:
    """The requests of one replica: admits them up to a limit, and drains them at shutdown. Owns ``shutting_down``.

    A request whose body is still arriving does not count towards the limit. A connection whose request has ended, and
    a kept request whose connection is gone, are drained with the others.
    """

    def __init__(self, max_ongoing_requests: int, timelines: Timelines, state: StateClient | None = None) -> None:
        self.shutting_down = False
        self._max_ongoing_requests = max_ongoing_requests
        self._timelines = timelines
        self._state = state
        self._throttle = Throttle()
        self._counted: set[Request] = set()
        self._connected: set[Request] = set()
        self._num_receiving = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_ongoing(self) -> int:
        return len(self._counted) - self._num_receiving

    @asynccontextmanager
    async def open(self, arrival: Arrival, queue: Admission) -> AsyncIterator[Request]:
        """Open one request, which ends with the block unless it is kept. Its prompts wait in ``queue``.

        Raises:
            ShuttingDownError, OverloadedError: this replica does not take it.
        """
        request = Request(arrival, self._timelines, queue, self._state)
        try:
            with request.working():
                await self._throttle.enter()
                request.take(self._place(request))
            self._connected.add(request)
            yield request
        except BaseException as error:
            if not request.kept:
                request.end(error)
            raise
        finally:
            if not request.kept:
                request.end()
            self._connected.discard(request)
            self._check_idle()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While a request receives its body it does not count. At the end it is refused if the replica is full."""
        self._num_receiving += 1
        try:
            yield
            if self.num_ongoing >= self._max_ongoing_requests:
                raise OverloadedError(_FULL)
        finally:
            self._num_receiving -= 1

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, give running requests ``grace_s`` seconds, then end them with an error."""
        self.shutting_down = True
        await self._until_idle(grace_s)
        for request in self._counted | self._connected:
            reason = ShuttingDownError("The server is shutting down and could not finish this request.")
            request.interrupt(reason)
            request.hang_up(reason)
        await self._until_idle(_ERROR_TIMEOUT_S)

    @contextmanager
    def _place(self, request: Request) -> Iterator[None]:
        """The place of one request in the replica."""
        if self.shutting_down:
            raise ShuttingDownError("The server is shutting down.")
        if self.num_ongoing >= self._max_ongoing_requests:
            raise OverloadedError(_FULL)
        self._counted.add(request)
        self._idle.clear()
        try:
            yield
        finally:
            self._counted.remove(request)
            self._check_idle()

    def _check_idle(self) -> None:
        if not self._counted and not self._connected:
            self._idle.set()

    async def _until_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


def _most_tokens(request: EngineCoreRequest, told: Told) -> int:
    """The most tokens that a prompt and its answers can take, without tokens that an earlier connection delivered."""
    most, params = len(request.prompt_token_ids) if told is None else 0, request.params
    if request.pooling is None:
        longest = params.max_tokens or 0
        most += params.n * longest - sum(longest if count is None else min(count, longest) for count in told or ())
    return most

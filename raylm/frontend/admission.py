"""Throttle: how many requests start in a turn of the event loop. Admission: how many wait for their first token."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from raylm.errors import OverloadedError

PER_TURN = 8  # each then takes a part of a millisecond to be read, checked and rendered, or refused
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


class QueuePolicy(Protocol):
    """How keys share the places of a finite queue."""

    def share(self, most: float, free: float, weight: float) -> float:
        """How many of ``most`` places a key of this ``weight`` may have, when ``free`` places are not taken."""
        ...


class FirstCome:
    """Places go to requests in the order of arrival."""

    def share(self, most: float, free: float, weight: float) -> float:
        return most


class FairShares:
    """A key may have as many places as are free, times its weight (dynamic thresholds, as in shared-memory switches).

    So one busy key fills half of the queue, two busy keys a third each, and a new key always finds room. If there is
    only one key, it may fill the queue.
    """

    def __init__(self, num_keys: Callable[[], int]) -> None:
        self._num_keys = num_keys

    def share(self, most: float, free: float, weight: float) -> float:
        return weight * free if self._num_keys() > 1 else most


class Admission:
    """The queue in front of the engines: counts sequences that wait for their first token, and their prompt tokens.

    A request that is being received, rendered or tokenized counts by an estimate from its bytes, then by its tokens.
    A request is always admitted if no other request of its key waits, whatever its size. So no key can shut out
    another. Beyond that the ``policy`` limits each key. At most ``at_once`` prompts of one request wait; its other
    prompts follow when these have begun. Without limits Admission only counts.
    All methods may raise OverloadedError, which says when to try again.
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
        """How many prompts of one request, of ``num_sequences`` each, may wait at once."""
        return max(1.0, self._max_requests // _PARTS // num_sequences)

    def check(self, num_bytes: int, key: str = "", weight: float = 1.0) -> None:
        """Refuse a prompt of ``num_bytes`` before any work is done on it."""
        self._check(1, self._estimate(num_bytes), Reservation(self, key, weight))

    def enter(self, num_bytes: int, key: str = "", weight: float = 1.0) -> Reservation:
        """Admit a request of a key before its body is parsed. The caller releases the Reservation."""
        reservation = Reservation(self, key, weight)
        reservation.grow(1, num_bytes)
        return reservation

    def prompt(self, num_tokens: int, num_sequences: int, request: Reservation | None = None) -> Reservation:
        """Let a tokenized prompt wait for the first tokens of its sequences.

        As part of an admitted ``request`` it takes over the estimate of that request. Otherwise it may be refused.
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
        """``mine`` and ``others`` wait already; ``more`` is asked for."""
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
        """Seconds until the waiting sequences have their first tokens, at the recent rate of first tokens."""
        if len(self._begun) < 2:
            return 1
        rate = len(self._begun) / max(self.clock() - self._begun[0], 1e-3)
        return min(max(math.ceil(self.requests / rate), 1), _MAX_RETRY_S)


class Reservation:
    """The sequences and tokens for which one request, or one of its prompts, counts in Admission."""

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
        """Count for more. If that is refused, the Reservation stays as it was."""
        requests, self._bytes = max(requests, self.requests), max(num_bytes, self._bytes)
        tokens = self._admission._estimate(self._bytes)
        self._admission._check(requests, tokens, self)
        self.set(requests, tokens)

    def expect(self, prompts: int, num_sequences: int) -> None:
        """Set the number of prompts and of sequences for each. Counts the prompts that wait at once."""
        waiting = int(min(prompts, self._admission.at_once(num_sequences)))
        self._bytes = self._bytes * waiting // prompts
        self.set(self.requests, self._admission._estimate(self._bytes))
        self.grow(waiting * num_sequences, 0)

    def give(self, requests: int) -> int:
        """Hand over the share of ``requests`` sequences. Returns the bytes from which they were estimated."""
        share = min(1.0, requests / self.requests) if self.requests else 0.0
        given = round(share * self._bytes)
        self._bytes -= given
        self.set(max(0, self.requests - requests), round(self.tokens * (1 - share)))
        return given

    def begin(self, indexes: Iterable[int]) -> None:
        """Note that these sequences have their first token. They, and the prompt they share, wait no longer."""
        fresh = set(indexes) - self._started
        self._started |= fresh
        self._admission._begun.extend([self._admission.clock()] * len(fresh))
        self.set(max(0, self.requests - len(fresh)), 0)

    def release(self) -> None:
        """Stop counting. Prompts of the request that are still to come count by themselves."""
        self.released = True
        self.set(0, 0)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

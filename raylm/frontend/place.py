"""Place: one admitted request on its way to the engines, with the key it came with; and what that key may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raylm.errors import InvalidRequestError
from raylm.frontend.admission import Admission, OngoingRequest, Reservation
from raylm.frontend.state.messages import NO_LIMITS, KeyLimits
from raylm.messages import ServiceLevel

Told = Sequence[int | None] | None
"""Tokens of each sequence that an earlier connection was told, None for all; () for none; None for a new request."""

if TYPE_CHECKING:
    from raylm.frontend.state.client import Hold, StateClient
    from raylm.frontend.timelines.record import Record
    from raylm.messages import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name and rights, without the key itself.

    Keys share by their ``weight``. ``max_output`` is its longest answer in tokens. An ``admin`` may change what is
    served, and sees and ends the requests of all keys. ``ttft_s`` and ``itl_s`` are the targets of its requests that
    name none. With ``own_prefixes`` the prefix cache shares nothing between it and other keys.
    """

    name: str
    weight: float = 1.0
    limits: KeyLimits = NO_LIMITS
    max_output: int | None = None
    admin: bool = True
    ttft_s: float | None = None
    itl_s: float | None = None
    own_prefixes: bool = False


class Place:
    """One request from when it is admitted to its end; of calls by handle ``key`` and ``state`` are None.

    It owns what the request has taken: its place in the replica, its room in the queue, what it holds of the limits of
    its key, and its ``record``. ``leave`` gives all of it back, once. A request that is ``kept`` outlives its
    connection: the task that goes on with it calls ``leave``.
    """

    def __init__(self, queue: Admission, key: ApiKey | None = None, state: StateClient | None = None) -> None:
        self.ongoing = OngoingRequest()
        self.key = key
        self.service = ServiceLevel()
        self.reservation: Reservation | None = None
        self.record: Record | None = None
        self.kept = False
        self._queue = queue
        self._state = state
        self._owned = ExitStack()
        self._reserved = False
        self._tokens: Hold | None = None
        self._unserved = 0  # prompts whose tokens are reserved
        self._served = 0
        self._prompts = 1
        self._prompt_tokens: int | None = None  # of all prompts, None while they are not known

    def check(self, num_bytes: int) -> None:
        """Refuse a body of so many bytes before it is read, where it will not find room in the queue."""
        self._queue.check(num_bytes, *self._name_and_weight())

    async def claim(self) -> None:
        """Count as a request of its key; RateLimitError if that is one too many."""
        if self.key is not None and self._state is not None and self.key.limits.bounds_requests:
            self._owned.callback((await self._state.claim(self.key.name, self.key.limits)).end)

    def wait(self, num_bytes: int) -> Reservation:
        """Join the queue with a body of so many bytes; OverloadedError if there is no room."""
        self.reservation = self._queue.enter(num_bytes, *self._name_and_weight())
        self._owned.callback(self.reservation.release)
        return self.reservation

    def record_as(self, record: Record) -> None:
        """``record`` is that of the request, and can end it."""
        self.record = record
        record.kept, record.cancel = self.kept, self.ongoing.interrupt

    def keep(self, account: AbstractContextManager[OngoingRequest]) -> None:
        """The request outlives its connection. ``account`` is its place in the replica from now on.

        The connection may still be interrupted by the former ``ongoing``.
        """
        self.ongoing = self._owned.enter_context(account)
        self.kept = True
        if self.record is not None:
            self.record_as(self.record)

    def expect(self, num_prompts: int, num_sequences: int) -> None:
        """It turns out to have so many prompts, of so many sequences each; OverloadedError if there is no room."""
        if self.reservation is not None:
            self.reservation.expect(num_prompts, num_sequences)

    def at_once(self, num_sequences: int) -> float:
        """How many of its prompts, of so many sequences each, may wait for their first tokens at once."""
        return self._queue.at_once(num_sequences)

    def bounded(self, request: EngineCoreRequest, max_tokens: int | None) -> EngineCoreRequest:
        """``request`` with an answer no longer than its key may ask for, where its client, by ``max_tokens``, does not.

        Raises:
            InvalidRequestError: it asks for more, or for more than its key is ever served in a minute.
        """
        if request.pooling is not None:
            return request
        most, params = self._longest_answer(request), request.params
        if most is None or params.max_tokens is None or params.max_tokens <= most:
            return request
        if max_tokens is not None or params.min_tokens > most or most < 1:
            name = "min_tokens" if max_tokens is None and params.min_tokens > most else "max_tokens"
            which = "this prompt" if self._prompts == 1 else "each of these prompts"
            message = f"'{name}' may be at most {max(most, 0)} for {which}, by the limits of this API key."
            raise InvalidRequestError(message, param=name)
        return replace(request, params=replace(params, max_tokens=most))

    @property
    def bounds_tokens(self) -> bool:
        """Whether its key has a limit of tokens, so that ``claim_tokens`` is to be called before the first prompt."""
        return self.key is not None and self._state is not None and self.key.limits.tokens_per_minute is not None

    async def claim_tokens(self, requests: Iterable[tuple[EngineCoreRequest, Told]], max_tokens: int | None) -> None:
        """Reserve in one claim what all prompts of the request may take at most, of each what was told before.

        ``max_tokens`` is what the client asks for.

        Raises:
            RateLimitError: they do not fit into what is left of this minute.
            InvalidRequestError: they never will.
        """
        if self.key is None or self._state is None or (limit := self.key.limits.tokens_per_minute) is None:
            return
        if self._reserved:
            return
        asked = list(requests)
        self._prompts = len(asked)
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request, _ in asked)
        bounded = [(self.bounded(request, max_tokens), told) for request, told in asked]
        tokens = sum(_most_tokens(request, told) for request, told in bounded)
        if tokens > limit:
            message = f"It takes up to {tokens:,} tokens; this API key is served {limit:,} in a minute."
            raise InvalidRequestError(message, param="max_tokens" if asked[0][0].pooling is None else "input")
        if tokens:
            self._tokens, self._unserved = await self._state.claim(self.key.name, self.key.limits, tokens), len(asked)
        self._reserved = True

    def count_served(self, tokens: int) -> None:
        """One of the prompts has ended; with the last one what was reserved beyond what was served is given back."""
        self._served += tokens
        self._unserved -= 1
        if self._tokens is not None and self._unserved <= 0:
            self._tokens.end(self._served)

    def leave(self) -> None:
        """It has ended; safe to repeat."""
        if self._tokens is not None:
            self._tokens.end(self._served)
        self._owned.close()

    def _longest_answer(self, request: EngineCoreRequest) -> int | None:
        """Tokens of each sequence that the key may ask for."""
        key, bounds = self.key, []
        if key is not None and key.max_output is not None:
            bounds.append(key.max_output)
        if key is not None and (limit := key.limits.tokens_per_minute) is not None:
            prompts = len(request.prompt_token_ids) if self._prompt_tokens is None else self._prompt_tokens
            bounds.append((limit - prompts) // (self._prompts * request.params.n))
        return min(bounds, default=None)

    def _name_and_weight(self) -> tuple[str, float]:
        return ("", 1.0) if self.key is None else (self.key.name, self.key.weight)


def _most_tokens(request: EngineCoreRequest, told: Told) -> int:
    """Tokens that a prompt and its answers may come to, beyond what an earlier connection was told."""
    most, params = len(request.prompt_token_ids) if told is None else 0, request.params
    if request.pooling is None:
        longest = params.max_tokens or 0
        most += params.n * longest - sum(longest if count is None else min(count, longest) for count in told or ())
    return most

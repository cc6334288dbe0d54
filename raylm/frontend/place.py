"""Place: everything that one admitted request has taken. ApiKey: the rights and limits of an API key."""

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
"""Number of tokens of each sequence that an earlier connection delivered (None: all of them).

() if it delivered none. None in place of the sequence for a new request.
"""

if TYPE_CHECKING:
    from raylm.frontend.state.client import Hold, StateClient
    from raylm.frontend.timelines.record import Record
    from raylm.messages import EngineCoreRequest


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


class Place:
    """Everything that one request has taken, from its admission to its end.

    This is its slot in the replica, its room in the queue, its share of the key's limits, and its ``record``. ``leave``
    gives all of it back, once. A request that is ``kept`` outlives its connection: the task that continues the request
    calls ``leave``. For calls by handle ``key`` and ``state`` are None.
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
        self._tokens: list[Hold] = []
        self._unserved = 0  # prompts whose tokens are reserved
        self._served = 0
        self._prompts = 1
        self._prompt_tokens: int | None = None  # of all prompts, None while they are not known

    def check(self, num_bytes: int) -> None:
        """Refuse a body of ``num_bytes`` before it is read. OverloadedError if the queue has no room for it."""
        self._queue.check(num_bytes, *self._name_and_weight())

    async def claim(self, *, begins: bool = True) -> None:
        """Count as a request of its key. RateLimitError if the key has reached a limit.

        A request that another replica began counts as open alone.
        """
        if self.key is not None and self._state is not None and self.key.limits.bounds_requests:
            self._owned.callback((await self._state.claim(self.key.name, self.key.limits, begins=begins)).end)

    def wait(self, num_bytes: int) -> Reservation:
        """Enter the queue with a body of ``num_bytes``. OverloadedError if there is no room."""
        self.reservation = self._queue.enter(num_bytes, *self._name_and_weight())
        self._owned.callback(self.reservation.release)
        return self.reservation

    def record_as(self, record: Record) -> None:
        """Set the record of the request, through which an operator can end the request."""
        self.record = record
        record.kept, record.cancel = self.kept, self.ongoing.interrupt

    def keep(self, account: AbstractContextManager[OngoingRequest]) -> None:
        """Let the request outlive its connection. From now on ``account`` is its slot in the replica.

        The former ``ongoing`` still interrupts the connection.
        """
        self.ongoing = self._owned.enter_context(account)
        self.kept = True
        if self.record is not None:
            self.record_as(self.record)

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
        if self._reserved:
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
            self._tokens.append(await self._state.claim(self.key.name, self.key.limits, tokens))
        self._reserved = True

    async def claim_again(self, request: EngineCoreRequest, told: Told) -> None:
        """Reserve the tokens of a request that ``claim_tokens`` left out because of ``told``: they are computed again.

        Raises:
            RateLimitError: the tokens exceed what is left of this minute.
        """
        if self.key is not None and self._state is not None and self.bounds_tokens:
            tokens = _most_tokens(request, None) - _most_tokens(request, told)
            self._tokens.append(await self._state.claim(self.key.name, self.key.limits, tokens))

    def count_served(self, tokens: int) -> None:
        """Count the ``tokens`` served for one ended prompt. After the last prompt the unused tokens are given back."""
        self._served += tokens
        self._unserved -= 1
        if self._unserved <= 0:
            self._end_claims()

    def leave(self) -> None:
        """Give back everything that the request has taken. Safe to repeat."""
        self._end_claims()
        self._owned.close()

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


def _most_tokens(request: EngineCoreRequest, told: Told) -> int:
    """The most tokens that a prompt and its answers can take, without those that an earlier connection delivered."""
    most, params = len(request.prompt_token_ids) if told is None else 0, request.params
    if request.pooling is None:
        longest = params.max_tokens or 0
        most += params.n * longest - sum(longest if count is None else min(count, longest) for count in told or ())
    return most

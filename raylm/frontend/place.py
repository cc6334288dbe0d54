"""Place: one admitted request on its way to the engines, with the key it came with; and what that key may ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raylm.errors import InvalidRequestError
from raylm.frontend.admission import Admission, OngoingRequest, Reservation
from raylm.frontend.state.messages import NO_LIMITS, KeyLimits
from raylm.messages import ServiceLevel

if TYPE_CHECKING:
    from raylm.frontend.state.client import Hold, StateClient
    from raylm.messages import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name and rights, without the key itself.

    Keys share by their ``weight``. ``max_output`` is its longest answer in tokens. An ``admin`` may change what is
    served. ``ttft_s`` and ``itl_s`` are the targets of its requests that name none.
    """

    name: str
    weight: float = 1.0
    limits: KeyLimits = NO_LIMITS
    max_output: int | None = None
    admin: bool = True
    ttft_s: float | None = None
    itl_s: float | None = None


class Place:
    """One request from when it is admitted to when it is answered; of calls by handle ``key`` and ``state`` are None.

    Whoever works on the request is given it, and asks it for what the request may have: room in the queue, tokens.
    """

    def __init__(self, queue: Admission, key: ApiKey | None = None, state: StateClient | None = None) -> None:
        self.ongoing = OngoingRequest()
        self.key = key
        self.service = ServiceLevel()
        self.reservation: Reservation | None = None
        self._queue = queue
        self._state = state
        self._hold: Hold | None = None

    def check(self, num_bytes: int) -> None:
        """Refuse a body of so many bytes before it is read, where it will not find room in the queue."""
        self._queue.check(num_bytes, *self._name_and_weight())

    async def claim(self) -> None:
        """Count as a request of its key; RateLimitError if that is one too many."""
        if self.key is not None and self._state is not None and self.key.limits.bounds_requests:
            self._hold = await self._state.claim(self.key.name, self.key.limits)

    def wait(self, num_bytes: int) -> Reservation:
        """Join the queue with a body of so many bytes; OverloadedError if there is no room."""
        self.reservation = self._queue.enter(num_bytes, *self._name_and_weight())
        return self.reservation

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
        most, params = self._longest_answer(request), request.params
        if most is None or params.max_tokens is None or params.max_tokens <= most:
            return request
        if max_tokens is not None or params.min_tokens > most or most < 1:
            name = "min_tokens" if max_tokens is None and params.min_tokens > most else "max_tokens"
            message = f"'{name}' may be at most {max(most, 0)} for this prompt, by the limits of this API key."
            raise InvalidRequestError(message, param=name)
        return replace(request, params=replace(params, max_tokens=most))

    async def claim_tokens(self, request: EngineCoreRequest) -> Hold | None:
        """Reserve what ``request`` may take at most; None where its key has no limit of tokens.

        Raises:
            RateLimitError: it does not fit into what is left of this minute.
            InvalidRequestError: it never will.
        """
        if self.key is None or self._state is None or (limit := self.key.limits.tokens_per_minute) is None:
            return None
        tokens = len(request.prompt_token_ids)
        if request.pooling is None:
            tokens += request.params.n * (request.params.max_tokens or 0)
        if tokens > limit:
            message = f"It takes up to {tokens:,} tokens; this API key is served {limit:,} in a minute."
            raise InvalidRequestError(message, param="max_tokens" if request.pooling is None else "input")
        return await self._state.claim(self.key.name, self.key.limits, tokens)

    def hand_over(self) -> Hold | None:
        """Leave the queue, and let who goes on with it after its answer end what it holds of its key's limits."""
        if self.reservation is not None:
            self.reservation.release()
        hold, self._hold = self._hold, None
        return hold

    def leave(self) -> None:
        """It is answered, or given up."""
        if (hold := self.hand_over()) is not None:
            hold.end()

    def _longest_answer(self, request: EngineCoreRequest) -> int | None:
        """Tokens of each sequence that the key may ask for."""
        key, bounds = self.key, []
        if key is not None and key.max_output is not None:
            bounds.append(key.max_output)
        if key is not None and key.limits.tokens_per_minute is not None:
            bounds.append((key.limits.tokens_per_minute - len(request.prompt_token_ids)) // request.params.n)
        return min(bounds, default=None)

    def _name_and_weight(self) -> tuple[str, float]:
        return ("", 1.0) if self.key is None else (self.key.name, self.key.weight)

"""Sequence and RequestState: what the Scheduler schedules, and the request that its n sequences belong to."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from raylm.errors import ContextLengthError, InvalidRequestError, RayLMError
from raylm.messages import EngineCoreRequest, FinishReason, Logprobs, NewSequence, TokenIds

_stop_ids = lru_cache(1024)(frozenset[int])  # many requests have the same ones
_U64 = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


class Status(Enum):
    """Only a running sequence has a row in the worker and KV blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the engine: its order of arrival, its seed, and which of its sequences are still open.

    ``limit`` is the longest that its sequences may grow, in tokens with the prompt. ``num_unforked`` sequences are
    not made yet: they start when the first one has computed the prompt that they share. ``adapter`` is the number of
    its LoRA adapter, 0 for the base model, ``adapter_digest`` that of its content. ``due`` is the time at which the
    request's first token should be there, set by the fair policy when the first sequence begins to wait.
    ``has_drawn`` is whether one of its sequences has drawn a token, here or in a lost engine; until then it has one.
    """

    client_id: str
    request: EngineCoreRequest
    arrival: int
    seed: int
    limit: int
    num_unforked: int
    stop_token_ids: tuple[int, ...] = ()
    adapter: int = 0
    adapter_digest: str = ""
    due: float = 0.0
    has_drawn: bool = False
    open: list[Sequence] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        client_id: str,
        request: EngineCoreRequest,
        arrival: int,
        max_model_len: int,
        adapter: int = 0,
        adapter_digest: str = "",
    ) -> RequestState:
        """The state of a new request, with the seed and the limit that it leaves open."""
        length, params = len(request.prompt_token_ids), request.params
        # A vector stands behind the prompt as a token would, without a position of its own.
        available = max_model_len - length + (request.pooling is not None)
        if available <= 0:
            message = f"The prompt has {length} tokens; with one to generate, at most {max_model_len} fit."
            raise ContextLengthError(message, param="prompt")
        if length == 0:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt")
        limit = length + min(available, params.max_tokens or available)
        if request.drawn and any(length + len(drawn or ()) >= limit for drawn in request.drawn):
            raise RayLMError(f"The answer that another engine began is longer than this one's {max_model_len} tokens.")
        seed = random.getrandbits(63) if params.seed is None else params.seed
        has_drawn = any(drawn != () for drawn in request.drawn)
        num_unforked = 0 if has_drawn else params.n - 1
        stops = (() if params.ignore_eos else request.eos_token_ids) + params.stop_token_ids
        numbers = arrival, seed, limit, num_unforked
        return cls(client_id, request, *numbers, stops, adapter, adapter_digest, has_drawn=has_drawn)

    def begin(self, ids: Iterator[int]) -> list[Sequence]:
        """Open the first sequence, or all that have not ended where another engine has computed the prompt."""
        if not self.request.drawn:
            return [self.sequence(self.arrival, 0)]
        open_ones = [index for index, drawn in enumerate(self.request.drawn) if drawn is not None]
        return [self.sequence(next(ids), index) for index in open_ones[: 1 if self.num_unforked else None]]

    def sequence(self, seq_id: int, index: int) -> Sequence:
        request = self.request
        token_ids = request.prompt_token_ids
        if drawn := (request.drawn[index] if request.drawn else None) or ():
            token_ids = array("I", [*token_ids, *drawn])
        length, wants_logprobs = len(token_ids), request.params.prompt_logprobs is not None
        seq = Sequence(
            seq_id, self, self.client_id, request.key, index, token_ids, length, self.limit, length + 1,
            _stop_ids(self.stop_token_ids), [] if wants_logprobs and index == 0 and not drawn else None,
        )  # fmt: skip
        if drawn:
            seq.next_check, seq.status = self.limit, Status.PREEMPTED
        self.open.append(seq)
        return seq

    def fork(self, ids: Iterator[int]) -> list[Sequence]:
        """The first token was drawn: open the sequences that share the computation of the prompt, once."""
        self.has_drawn = True
        count, self.num_unforked = self.num_unforked, 0
        return [self.sequence(next(ids), index) for index in range(1, count + 1)]


@dataclass(slots=True, eq=False)
class Sequence:
    """What is scheduled: tokens known, and how many of them are computed.

    ``token_ids`` are known, until its ``start`` in the request's own list; ``num_tokens`` also counts those that steps
    in flight will draw, one each, and ``num_computed`` what they compute: accepted drafts are counted when the steps
    are seen. ``next_check`` is the length at which a token is more than an append: the first generated one's, then
    ``limit``. A preempted sequence may start again when the result of step ``resume_after`` was seen. ``num_cached``
    prompt tokens came from the prefix cache. ``due`` orders it among the sequences that wait; the fair policy owns it.
    ``prompt_logprobs`` gathers those of the prompt, None if they are not asked for (any more).
    """

    id: int
    state: RequestState
    client_id: str
    key: int
    index: int
    token_ids: TokenIds
    num_tokens: int
    limit: int
    next_check: int
    stop_ids: frozenset[int]
    prompt_logprobs: list[Logprobs] | None
    num_computed: int = 0
    num_cached: int = 0
    resume_after: int = 0
    due: float = 0.0
    status: Status = Status.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.state.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def ended_by(self) -> tuple[FinishReason, int | None] | None:
        """Its finish reason, and the caller's stop token if that was one, by its last token; None while it goes on."""
        request, token = self.state.request, self.token_ids[-1]
        if token in self.stop_ids and self.num_generated > request.params.min_tokens:
            by_eos = token in request.eos_token_ids and not request.params.ignore_eos
            return "stop", None if by_eos else token
        return ("length", None) if len(self.token_ids) >= self.limit else None

    @property
    def reads_every_token(self) -> bool:
        """Whether each prompt token must be computed (again), as the answer depends on its hidden state."""
        pooling = self.state.request.pooling
        return self.prompt_logprobs is not None or (pooling is not None and pooling.reads_every_token)

    def start(self, cached: int) -> None:
        """It runs from now on, with ``cached`` of its tokens computed. Only now is a prompt copied, to append to."""
        if self.status is Status.WAITING:
            self.token_ids = self.token_ids[:]
            self.num_cached = cached
        else:
            self.next_check = len(self.token_ids) + 1  # that it has caught up is told
        self.status = Status.RUNNING
        self.num_computed = cached
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def accept_drafts(self, count: int) -> None:
        """A step drew ``count`` tokens more than one: steps in flight that were to go beyond the limit will not run."""
        self.num_tokens += count
        self.num_computed = min(self.num_computed + count, self.limit - 1)

    def defer(self) -> None:
        """A step did not draw the token that was counted on: the last token is computed again, to draw it."""
        self.num_tokens -= 1
        if self.status is Status.RUNNING:
            self.num_computed -= 1

    def as_new(self, block_ids: list[int]) -> NewSequence:
        """For a worker that has no row of it; prompt logprobs are asked for only once."""
        request = self.state.request
        params = request.params
        if params.prompt_logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=None)
        return NewSequence(
            seq_id=self.id,
            token_ids=self.token_ids[:] if self.num_generated else request.prompt_token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            block_ids=list(block_ids),
            params=params,
            seed=sequence_seed(self.state.seed, self.index),
            stop_token_ids=self.state.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            grammar=request.grammar,
            thinking=request.thinking,
            limit=self.limit,
            pooling=request.pooling,
            adapter=self.state.adapter,
            owner=f"{request.service.tenant}\0{request.cache_salt or ''}",
        )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence ``index`` of a request, a signed 64-bit integer; index 0 has the request's own.

    The others are drawn from it by SplitMix64 (Steele, Lea, Flood 2014), so that no two share a random stream.
    """
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN) % _U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _U64
    z ^= z >> 31
    return z - _U64 if z >= _U64 // 2 else z

"""Sequence: the unit of scheduling. RequestState: the request to which its n sequences belong."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from raylm.errors import ContextLengthError, InvalidRequestError, RayLMError
from raylm.messages import EngineCoreRequest, FinishReason, Logprobs, NewSequence, TokenIds

_stop_ids = lru_cache(1024)(frozenset[int])  # many requests have the same stop ids
_U64 = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


class Status(Enum):
    """State of a sequence. Only a running sequence has a row in the worker and KV blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the engine: its order of arrival, its seed, and its open sequences.

    ``limit`` is the greatest length of its sequences in tokens, with the prompt. ``num_unforked`` sequences are not
    created yet: they start when the first sequence has computed the shared prompt. ``adapter`` is the number of the
    LoRA adapter (0: base model), ``adapter_digest`` the digest of its content. ``due`` is the time at which the first
    token of the request is due; the fair policy sets it when the first sequence begins to wait. ``has_drawn`` says
    whether a sequence has drawn a token, here or in a lost engine; until then only one sequence exists.
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
        """Create the state of a new request. Draws a seed and computes the limit if the request leaves them open.

        Raises:
            ContextLengthError: the prompt leaves no room for a token.
            InvalidRequestError: the prompt is empty.
            RayLMError: the tokens drawn by a lost engine exceed the limit of this engine.
        """
        length, params = len(request.prompt_token_ids), request.params
        # A pooled vector takes no position in the context, unlike a generated token.
        available = max_model_len - length + (request.pooling is not None)
        if available <= 0:
            message = f"The prompt has {length} tokens; with one to generate, at most {max_model_len} fit."
            raise ContextLengthError(message, param="prompt")
        if length == 0:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt")
        limit = length + min(available, params.max_tokens or available)
        if request.drawn and any(length + len(drawn or ()) >= limit for drawn in request.drawn):
            raise RayLMError(
                f"The tokens that another engine generated exceed max_model_len of this engine ({max_model_len})."
            )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        has_drawn = any(drawn != () for drawn in request.drawn)
        num_unforked = 0 if has_drawn else params.n - 1
        stops = (() if params.ignore_eos else request.eos_token_ids) + params.stop_token_ids
        numbers = arrival, seed, limit, num_unforked
        return cls(client_id, request, *numbers, stops, adapter, adapter_digest, has_drawn=has_drawn)

    def begin(self, ids: Iterator[int]) -> list[Sequence]:
        """Open the first sequence, or all unfinished sequences of a request continued from a lost engine."""
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
        """Called when a first token was drawn: open the other sequences that share the prompt, once."""
        self.has_drawn = True
        count, self.num_unforked = self.num_unforked, 0
        return [self.sequence(next(ids), index) for index in range(1, count + 1)]


@dataclass(slots=True, eq=False)
class Sequence:
    """The unit of scheduling: known tokens, and how many of them are computed.

    ``token_ids`` are the known tokens; until ``start`` this is the list of the request itself. ``num_tokens`` also
    counts the token that each step in flight will draw, and ``num_computed`` the tokens that they compute; accepted
    drafts are added when the results arrive. ``next_check`` is the length at which an appended token needs handling:
    first that of the first generated token, then ``limit``. A preempted sequence may restart when the result of step
    ``resume_after`` has arrived. With stages, ``last_draw`` is the last step in which it draws. ``num_cached`` is the
    number of prompt tokens found in the prefix cache. ``due`` orders the waiting sequences, and ``num_charged`` is the
    number of its tokens that are charged to the tenant; the fair policy owns both. ``prompt_logprobs`` collects the
    log-probabilities of the prompt; None if they were not requested or are delivered already.
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
    last_draw: int = 0
    due: float = 0.0
    num_charged: int = 0
    status: Status = Status.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.state.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_prompt_left(self) -> bool:
        """Whether it needs more than one token to catch up: tokens of its prompt, or of an answer after preemption."""
        return self.num_tokens - self.num_computed > 1

    @property
    def ended_by(self) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop token) if the last token ends the sequence, else None.

        The stop token is None unless it is one of the caller's stop tokens.
        """
        request, token = self.state.request, self.token_ids[-1]
        if token in self.stop_ids and self.num_generated > request.params.min_tokens:
            by_eos = token in request.eos_token_ids and not request.params.ignore_eos
            return "stop", None if by_eos else token
        return ("length", None) if len(self.token_ids) >= self.limit else None

    @property
    def reads_every_token(self) -> bool:
        """Whether every prompt token must be computed, even if cached: the answer depends on its hidden state."""
        pooling = self.state.request.pooling
        return self.prompt_logprobs is not None or (pooling is not None and pooling.reads_every_token)

    def start(self, cached: int) -> None:
        """Mark the sequence as running, with ``cached`` tokens computed. Copies the prompt, to which it will append."""
        if self.status is Status.WAITING:
            self.token_ids = self.token_ids[:]
            self.num_cached = cached
        else:
            self.next_check = len(self.token_ids) + 1  # the observer is told of the first token after a preemption
        self.status = Status.RUNNING
        self.num_computed = cached
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def accept_drafts(self, count: int) -> None:
        """Add ``count`` accepted drafts of a step. The worker skips steps in flight that would exceed the limit."""
        self.num_tokens += count
        self.num_computed = min(self.num_computed + count, self.limit - 1)

    def defer(self) -> None:
        """Called when a step drew no token although one was expected: the last token is computed again."""
        self.num_tokens -= 1
        if self.status is Status.RUNNING:
            self.num_computed -= 1

    def as_new(self, block_ids: list[int]) -> NewSequence:
        """The message that creates the worker's row of this sequence. Prompt logprobs are requested only once."""
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
    """The seed of sequence ``index`` of a request, a signed 64-bit integer. Sequence 0 has the request's own seed.

    The other seeds are derived from it by SplitMix64 (Steele, Lea, Flood 2014), so that sequences draw independently.
    """
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN) % _U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _U64
    z ^= z >> 31
    return z - _U64 if z >= _U64 // 2 else z

"""InputProcessor: builds an EngineCoreRequest from a caller's parameters, resolves defaults and checks token ids."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from raylm.errors import ContextLengthError, InvalidRequestError
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.threads import offload
from raylm.messages import EngineCoreRequest, ReasoningTokenIds, ServiceLevel, TokenIds
from raylm.params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from raylm.frontend.request import Request

MAX_CACHE_SALT_CHARS = 128
MAX_STOP_CHARS = 2_048
_NO_SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request's id and its options that are common to text and vectors.

    A lower ``priority`` is served earlier (under the priority policy). Only requests of the same ``cache_salt`` share
    cached prefixes. ``arrival_time`` is in seconds since the epoch. ``param`` is the field that errors about the prompt
    name. ``adapter`` names a LoRA adapter, None means the base model. ``request`` is the Request of the prompt, None in
    offline use. ``told`` counts the tokens that the caller already has, by sequence: None means all, () none of any
    sequence. ``resumable_as`` is the name under which another replica can take over the drawn tokens, "" if none can. A
    request that ``is_resumed`` takes over tokens under this name. ``stream`` is the name of a stream that its client
    continues, "" for all other requests. Where the answer ``continues`` the text of the prompt, the space between both
    belongs to it.
    """

    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.time)
    param: str = "prompt"
    adapter: str | None = None
    request: Request | None = None
    told: tuple[int | None, ...] = ()
    resumable_as: str = ""
    is_resumed: bool = False
    stream: str = ""
    continues: bool = False

    @property
    def service(self) -> ServiceLevel:
        """The service level of the request beside others."""
        return ServiceLevel() if self.request is None else self.request.service

    @property
    def told_before(self) -> tuple[int | None, ...] | None:
        """Like ``told``, but None for a request that did not begin on an earlier connection."""
        return self.told if self.told or self.is_resumed or self.stream else None

    def nth(self, place: int, param: str | None = None) -> RequestHead:
        """The head of prompt ``place`` of a request with several prompts. ``param`` is the field of the prompt."""
        return replace(self, request_id=f"{self.request_id}-{place}", param=param or self.param)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every ready engine: ``max_model_len`` in tokens, and token ids below ``vocab_size``."""

    max_model_len: int
    vocab_size: int


class InputProcessor:
    """Builds requests and numbers them. Keeps no state of a request."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], default_max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._default_max_tokens = default_max_tokens
        self._keys = count(1)

    def check_chars(self, num_chars: int, max_model_len: int, param: str) -> None:
        """Raise ContextLengthError for a text that cannot fit in the context, before it is tokenized."""
        if num_chars > max_model_len * self._tokenizer.longest_token_chars:
            what = f"your prompt has {num_chars} characters, which can never fit. Please shorten it."
            raise _too_long(max_model_len, what, param)

    def build(
        self,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        limits: Limits,
        head: RequestHead,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: str | None = None,
        thinking: ReasoningTokenIds | None = None,
    ) -> EngineCoreRequest:
        """Check one request and fill in defaults. ``bad_words`` are token ids and ``grammar`` is compiled.

        ``thinking`` describes the reasoning of answers.

        Raises:
            ContextLengthError: prompt and ``max_tokens`` exceed the context.
            InvalidRequestError: a field is wrong.
        """
        _check_prompt(prompt_token_ids, limits, head.param)
        _check_length(len(prompt_token_ids), params.max_tokens, limits.max_model_len, head.param)
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            _check_ids(name, getattr(params, name), limits)
        if any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
            raise InvalidRequestError(f"stop strings must have at most {MAX_STOP_CHARS} characters.", param="stop")
        default = limits.max_model_len - len(prompt_token_ids)
        if self._default_max_tokens is not None:  # the default must fit the context, and be at least ``min_tokens``
            default = min(default, max(self._default_max_tokens, params.min_tokens))
        seed = random.getrandbits(63) if params.seed is None else params.seed
        complete = replace(params, max_tokens=params.max_tokens or default, seed=seed, structured_outputs=None)
        return self._request(
            prompt_token_ids,
            complete,
            head,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=bad_words,
            grammar=grammar,
            thinking=thinking,
        )

    def build_pooling(
        self, prompt_token_ids: TokenIds, params: PoolingParams, limits: Limits, head: RequestHead
    ) -> EngineCoreRequest:
        """Check one request for a vector. Raises as ``build``."""
        _check_prompt(prompt_token_ids, limits, head.param)
        if len(prompt_token_ids) > limits.max_model_len:
            what = f"your {head.param} has {len(prompt_token_ids)} tokens. Please shorten it."
            raise _too_long(limits.max_model_len, what, head.param)
        return self._request(prompt_token_ids, _NO_SAMPLING, head, pooling=params)

    def _request(
        self, prompt_token_ids: TokenIds, params: SamplingParams, head: RequestHead, **rest: Any
    ) -> EngineCoreRequest:
        if head.cache_salt is not None and not 1 <= len(head.cache_salt) <= MAX_CACHE_SALT_CHARS:
            message = f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters."
            raise InvalidRequestError(message, param="cache_salt")
        return EngineCoreRequest(
            key=next(self._keys),
            request_id=head.request_id,
            prompt_token_ids=array("I", prompt_token_ids),
            params=params,
            priority=head.priority,
            cache_salt=head.cache_salt,
            arrival_time=head.arrival_time,
            adapter=head.adapter,
            service=head.service,
            resumable_as=head.resumable_as,
            **rest,
        )

    async def bad_words(self, words: tuple[str, ...], limits: Limits) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the start of a text and after a space. Both are banned."""

        def work() -> tuple[tuple[int, ...], ...]:
            texts = chain.from_iterable((word.lstrip(), f" {word.lstrip()}") for word in words)
            found = [self._tokenizer.encode_now(text, add_special_tokens=False, param="bad_words") for text in texts]
            _check_ids("bad_words", chain.from_iterable(found), limits)
            return tuple(dict.fromkeys(map(tuple, found)))

        return await offload(work, sum(map(len, words)) // 2) if words else ()


def _check_prompt(token_ids: TokenIds, limits: Limits, param: str) -> None:
    if not token_ids:
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    if isinstance(token_ids, array):
        _check_ids(param, (int(np.frombuffer(token_ids, np.uint32).max()),), limits)
    else:
        _check_ids(param, (min(token_ids), max(token_ids)), limits)


def _check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    if num_prompt_tokens >= max_model_len:
        what = f"your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer. "
        raise _too_long(max_model_len, what + "Please shorten the prompt.", param)
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        num_tokens = num_prompt_tokens + max_tokens
        what = f"{num_tokens} tokens ({num_prompt_tokens} in the {param}, {max_tokens} in the completion)"
        advice = f"Please reduce the length of the {param} or of the completion."
        raise _too_long(max_model_len, f"you requested {what}. {advice}", param)


def _too_long(max_model_len: int, what: str, param: str) -> ContextLengthError:
    message = f"This model's maximum context length is {max_model_len} tokens. However, {what}"
    return ContextLengthError(message, param=param)


def _check_ids(param: str, token_ids: Iterable[int], limits: Limits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            what = f"{param} contains the token id {str(token_id)[:24]}"
            raise InvalidRequestError(f"{what}; ids must be from 0 to {limits.vocab_size - 1}.", param=param)

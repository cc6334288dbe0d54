"""InputProcessor: turns what a caller asked into an EngineCoreRequest, every default resolved and every id checked."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError, ContextLengthError, InvalidRequestError
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.threads import offload
from raylm.frontend.types import RequestHead
from raylm.messages import EngineCoreRequest, Thinking
from raylm.params import PoolingParams, SamplingParams

MAX_STOP_CHARS = 2_048
_NO_SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Limits:
    """What every ready engine can take: the longest sequence in tokens, and ids below ``vocab_size``."""

    max_model_len: int
    vocab_size: int


class InputProcessor:
    """Owns the numbering of requests; keeps nothing of any of them."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], default_max_tokens: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._default_max_tokens = default_max_tokens
        self._keys = count(1)

    def check_text(self, text: str, limits: Limits, param: str) -> None:
        """Refuse a text that is too long for the context whatever its tokens are, before it is tokenized.

        Raises:
            ContextLengthError: naming ``param``.
        """
        self.check_chars(len(text), limits.max_model_len, param)

    def check_chars(self, num_chars: int, max_model_len: int, param: str) -> None:
        """As ``check_text``, for a text that is not put together yet."""
        most = max_model_len * self._tokenizer.longest_token_chars
        if num_chars > most:
            raise ContextLengthError(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
                f"{num_chars} characters, which can never fit. Please shorten it.",
                param=param,
            )

    def build(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        limits: Limits,
        head: RequestHead,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: str | None = None,
        thinking: Thinking | None = None,
    ) -> EngineCoreRequest:
        """Check and complete one request.

        ``bad_words`` are those of ``params``, tokenized; ``grammar`` is what ``params.structured_outputs`` come to;
        ``thinking`` tells how answers may begin.

        Raises:
            ContextLengthError: prompt and max_tokens do not fit.
            InvalidRequestError: a field is out of its range.
        """
        self._check_prompt(prompt_token_ids, limits, head.param)
        check_length(len(prompt_token_ids), params.max_tokens, limits, head.param)
        self._check_params(params, limits)
        head.check()
        complete = replace(
            params,
            max_tokens=params.max_tokens or self._max_tokens(limits.max_model_len - len(prompt_token_ids), params),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            structured_outputs=None,
        )
        return replace(
            self._request(prompt_token_ids, complete, head),
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=bad_words,
            grammar=grammar,
            thinking=thinking,
        )

    def _max_tokens(self, room: int, params: SamplingParams) -> int:
        """What holds where the caller says nothing: a default gives way to the context, and to ``min_tokens``."""
        if self._default_max_tokens is None:
            return room
        return min(room, max(self._default_max_tokens, params.min_tokens))

    def build_pooling(
        self, prompt_token_ids: list[int], params: PoolingParams, limits: Limits, head: RequestHead
    ) -> EngineCoreRequest:
        """Check and complete one request for a vector.

        Raises:
            ContextLengthError: the prompt does not fit.
            InvalidRequestError: a field is out of its range.
        """
        self._check_prompt(prompt_token_ids, limits, head.param)
        if len(prompt_token_ids) > limits.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, your {head.param} has "
                f"{len(prompt_token_ids)} tokens. Please shorten it.",
                param=head.param,
            )
        head.check()
        return replace(self._request(prompt_token_ids, _NO_SAMPLING, head), pooling=params)

    def _request(self, prompt_token_ids: list[int], params: SamplingParams, head: RequestHead) -> EngineCoreRequest:
        """What all requests have, with a number of its own."""
        return EngineCoreRequest(
            key=next(self._keys),
            request_id=head.request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=head.priority,
            cache_salt=head.cache_salt,
            arrival_time=head.arrival_time,
            adapter=head.adapter,
        )

    def _check_prompt(self, token_ids: list[int], limits: Limits, param: str) -> None:
        if not token_ids:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        _check_ids(param, (min(token_ids), max(token_ids)), limits)

    def _check_params(self, params: SamplingParams, limits: Limits) -> None:
        _check_ids("logit_bias", params.logit_bias, limits)
        _check_ids("allowed_token_ids", params.allowed_token_ids, limits)
        _check_ids("stop_token_ids", params.stop_token_ids, limits)
        if any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
            raise InvalidRequestError(f"stop may hold strings of at most {MAX_STOP_CHARS} characters.", param="stop")

    async def bad_words(self, words: tuple[str, ...], limits: Limits) -> tuple[tuple[int, ...], ...]:
        """The tokens of ``words``; many of them, or long ones, are tokenized in a thread.

        Raises:
            InvalidRequestError: one holds what is no text, or no token of this model.
        """
        return await offload(lambda: self._bad_words(words, limits), sum(map(len, words)) // 2) if words else ()

    def _bad_words(self, words: tuple[str, ...], limits: Limits) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space: banned in both places."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                token_ids = self._tokenizer.encode_now(text, add_special_tokens=False, param="bad_words")
                _check_ids("bad_words", token_ids, limits)
                found[tuple(token_ids)] = None
        return tuple(found)


def check_length(num_prompt_tokens: int, max_tokens: int | None, limits: Limits, param: str) -> None:
    """Check that the prompt, and the answer that is asked for, fit into the context.

    Raises:
        ContextLengthError: naming ``param``.
    """
    most = limits.max_model_len
    head = f"This model's maximum context length is {most} tokens. However, "
    if num_prompt_tokens >= most:
        raise ContextLengthError(
            f"{head}your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer. "
            "Please shorten the prompt.",
            param=param,
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > most:
        raise ContextLengthError(
            f"{head}you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {param}, "
            f"{max_tokens} in the completion). Please reduce the length of the {param} or of the completion.",
            param=param,
        )


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's own wishes for sampling: the values its generation_config.json sets.

    Raises:
        ConfigError: one is out of range.
    """
    found = {name: checkpoint.generation_config.get(name) for name in _DEFAULTS}
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequestError, TypeError) as error:
        raise ConfigError(f"model: generation_config.json holds a bad value: {error}") from error
    return defaults


def default_max_tokens(checkpoint: Checkpoint) -> int | None:
    """``max_new_tokens`` of the checkpoint's generation_config.json: the length of answers for which nobody asks.

    Raises:
        ConfigError: it is no positive integer.
    """
    found = checkpoint.generation_config.get("max_new_tokens")
    if found is None or (type(found) is int and found >= 1):
        return found
    raise ConfigError("model: generation_config.json holds a bad value: max_new_tokens must be at least 1.")


def _check_ids(param: str, token_ids: Iterable[int], limits: Limits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                f"{param} holds the token id {str(token_id)[:24]}; ids go from 0 to {limits.vocab_size - 1}.",
                param=param,
            )

"""The fields that chat and plain completions share, and how they become SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import Body, StringOrStrings, Strings, TokenIds, at_most, unsupported
from raylm.ingress.openai.request_body import RequestBody
from raylm.ingress.openai.structured_outputs import form_of
from raylm.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "prompt_logprobs",
)  # fmt: skip
_TUPLES = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_MAX_BIAS = 100.0

MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # the largest vocabularies


class StreamOptions(Body):
    """What a stream carries beside its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(RequestBody):
    """Fields of /v1/chat/completions and /v1/completions alike."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(lt=2**31)] | None = None
    stop: StringOrStrings | None = None
    stop_token_ids: Annotated[TokenIds | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_LOGIT_BIAS)] = None
    allowed_token_ids: Annotated[TokenIds | None, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] = None
    bad_words: Strings | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_id_keys(cls, bias: dict[str, float] | None, _: ValidationInfo) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise ValueError(f"'{clip(key, 20)}' is not a token id")
        return bias

    @property
    def options(self) -> StreamOptions:
        """``stream_options``, checked.

        Raises:
            InvalidRequestError: they are wrong, or there is no stream to apply them to.
        """
        if self.stream_options is None:
            return StreamOptions()
        if not self.stream:
            raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
        try:
            options = StreamOptions.parse(self.stream_options)
        except InvalidRequestError as error:
            raise type(error)(error.message, param=f"stream_options.{error.param}") from None
        if options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "obfuscation is not supported; give false.")
        return options

    def check(self, config: Config) -> None:
        """Refuse also what a stream cannot carry.

        Raises:
            InvalidRequestError: it is asked for.
        """
        super().check(config)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("'prompt_logprobs' is not available in a stream.", param="prompt_logprobs")

    def sampling(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """SamplingParams by precedence: ``overrides``, the user's fields, the checkpoint's ``defaults``, OpenAI's.

        Raises:
            InvalidRequestError: a value lies out of range.
        """
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        given |= {name: tuple(value) for name in _TUPLES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            clamped = {int(key): max(-_MAX_BIAS, min(_MAX_BIAS, bias)) for key, bias in self.logit_bias.items()}
            given["logit_bias"] = clamped
        given["structured_outputs"] = form_of(self.response_format, self.structured_outputs)
        given |= {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{**defaults, **given})

"""The fields that bodies of all APIs share, and their conversion to RequestHead and SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NotRequired, Self, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from typing_extensions import TypedDict

from raylm.config import Config
from raylm.errors import InvalidRequestError, ModelNotFoundError
from raylm.frontend import Request, RequestHead
from raylm.ingress.http.errors import clip
from raylm.ingress.http.stream_ids import LAST_EVENT_ID, UNRESUMABLE, Posted, StreamId, StreamIds
from raylm.ingress.openai.fields import (
    MAX_FIELDS,
    Body,
    Model,
    NumLogprobs,
    OneOf,
    Prompt,
    RequestId,
    StrictPart,
    StringOrStrings,
    Strings,
    TokenIds,
    at_most,
    closed,
    refuse,
    unsupported,
)
from raylm.params import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

# Fields with the same name in SamplingParams. The other fields have a different form in a body.
_SAME_NAME = {field.name for field in fields(SamplingParams)} - {
    "max_tokens", "logprobs", "logit_bias", "structured_outputs",
}  # fmt: skip
_MAX_BIAS = 100.0
# Other servers' names of fields.
FORMS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
_LENGTHS = ("max_new_tokens", "max_output_tokens", "num_predict", "n_predict")

_Ids = TypeVar("_Ids", bound=Sequence[int])

MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # vocabularies are at most this large


class RequestBody(Body):
    """Fields that requests for text and for vectors share. None always means "not given".

    ``user`` identifies the end user for abuse detection, and has no effect on the answer by OpenAI's definition.
    """

    model: Model = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: RequestId | None = None
    user: str | None = None

    def check(self, config: Config) -> None:
        """Check for fields that contradict each other, and values that are not supported.

        Raises:
            InvalidRequestError: names the field.
        """
        check_schedule(self, config)

    def head(self, request: Request, name: str, arrival_time: float, param: str, llm: AsyncLLM) -> RequestHead:
        """The head of the body's requests, whose prompts come from the field ``param``.

        Raises:
            ModelNotFoundError: the model is unknown.
        """
        return RequestHead(
            request_id=name,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            arrival_time=arrival_time,
            param=param,
            adapter=check_model(self.model, llm),
            request=request,
        )


def check_schedule(body: RequestBody, config: Config) -> None:
    """Raise UnsupportedFieldError for a priority that the scheduling policy ignores."""
    if body.priority is not None and config.scheduler.policy != "priority":
        raise unsupported(
            "priority", f"this server does not schedule by it (scheduler.policy: {config.scheduler.policy})."
        )


def check_target(request: Request, config: Config) -> None:
    """Raise UnsupportedFieldError for a latency target that the scheduling policy ignores."""
    if request.service.ttft_s is not None and config.scheduler.policy != "fair":
        raise unsupported(
            "x-raylm-ttft-ms", f"this server does not schedule by it (scheduler.policy: {config.scheduler.policy})."
        )


def check_model(name: str, llm: AsyncLLM) -> str | None:
    """The LoRA adapter of this name, None for the base model.

    Raises:
        ModelNotFoundError: ``name`` is neither an adapter nor the model.
    """
    if name == llm.model_name:
        return None
    if name not in llm.adapters.known:
        shown = clip(name, 100)
        lost = llm.adapters.lost.get(name)
        why = f"was lost: {lost}" if lost else f"does not exist; this server serves '{llm.model_name}'."
        raise ModelNotFoundError(f"The model '{shown}' {why}", param="model")
    return name


async def open_stream(
    model: str, posted: Posted, num_choices: int, ids: StreamIds, llm: AsyncLLM, *, streamed: bool | None
) -> StreamId:
    """The id of the answer's events. UNRESUMABLE if it is not ``streamed``, or the client does not read ids.

    Raises:
        RayLMError: as StreamIds.open, or no engine that can continue is ready.
    """
    if not streamed and posted.last_event_id:
        raise InvalidRequestError(f"'{LAST_EVENT_ID}' needs 'stream' to be true.", param=LAST_EVENT_ID)
    if not streamed or not posted.reads_ids:
        return UNRESUMABLE
    if posted.last_event_id:
        await llm.until_ready()
    adapter, fingerprint = llm.adapters.known.get(model), llm.fingerprint
    loaded_from = "" if adapter is None else adapter.path
    return await ids.open(posted, num_choices, loaded_from + fingerprint if fingerprint else "")


async def tokenized(prompt: Prompt, body: CutBody, llm: AsyncLLM, *, special: bool = True) -> Prompt:
    """Truncate ``prompt`` as ``body`` says. A text stays a text unless it is cut or ``special`` is False."""
    if isinstance(prompt, list):
        return body.cut(prompt, llm.max_model_len)
    if special and body.truncate_prompt_tokens is None:
        return prompt
    token_ids = await llm.tokenize(prompt, add_special_tokens=special)
    kept = body.cut(token_ids, llm.max_model_len)
    return prompt if special and len(kept) == len(token_ids) else kept


def opens_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the template opens a new turn. The default is True, unless the last message is continued."""
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


@closed
class PlainFormat(TypedDict):
    type: Literal["text"]


@closed
class JSONObjectFormat(TypedDict):
    """``schema`` (llama.cpp's name) or ``value`` (huggingface_hub's) is the JSON schema of the object."""

    type: Literal["json_object"]
    schema: NotRequired[dict[str, Any] | None]
    value: NotRequired[dict[str, Any] | None]


@closed
class JSONSchema(TypedDict):
    name: str
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@closed
class JSONSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: Annotated[JSONSchema, at_most(MAX_FIELDS)]


ResponseFormat = Annotated[
    PlainFormat | JSONObjectFormat | JSONSchemaFormat,
    OneOf("only text, json_object, json_schema are supported.", key="type", served=False),
]


def _strings(choice: object) -> object:
    if isinstance(choice, list) and not all(isinstance(entry, str) for entry in choice):
        raise ValueError("expected an array of strings")
    return choice


def _some_json(schema: bool) -> bool:
    if not schema:
        raise ValueError("the schema false allows no answer")
    return schema


@closed
class Constraints(TypedDict, total=False):
    """vLLM's ``structured_outputs``. Exactly one field must be set. ``json`` true is the schema of any JSON."""

    json: (
        Annotated[
            dict[str, Any] | Annotated[bool, AfterValidator(_some_json)] | str,
            OneOf("expected an object, true or a string, but got {got}"),
        ]
        | None
    )
    regex: str | None
    choice: Annotated[list[str], BeforeValidator(_strings)] | None
    grammar: str | None
    json_object: bool | None


def _json_object(chosen: JSONObjectFormat) -> StructuredOutputs:
    given = [name for name in ("schema", "value") if chosen.get(name) is not None]
    if not given:
        return StructuredOutputs(json_object=True, param="response_format")
    if len(given) == 2:
        message = "'schema' and 'value' are two names of one schema; give one of them."
        raise InvalidRequestError(message, param="response_format.value")
    schema = chosen.get("schema") if given == ["schema"] else chosen.get("value")
    return StructuredOutputs(json=schema, param=f"response_format.{given[0]}")


def structured_outputs_of(chosen: ResponseFormat | None, asked: Constraints | None) -> StructuredOutputs | None:
    """The form that ``response_format`` or ``structured_outputs`` asks for, None for free text.

    Raises:
        InvalidRequestError: both are set.
    """
    by_format = None
    if chosen is not None and chosen["type"] == "json_object":
        by_format = _json_object(chosen)
    elif chosen is not None and chosen["type"] == "json_schema":
        schema = chosen["json_schema"].get("schema")
        by_format = StructuredOutputs(
            json=schema, json_object=schema is None, param="response_format.json_schema.schema"
        )
    if asked is None:
        return by_format
    if by_format is not None:
        message = "'structured_outputs' and 'response_format' must not both be set."
        raise InvalidRequestError(message, param="structured_outputs")
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if given.get("json") in (True, "true"):
        given["json"] = {}
    if "choice" in given:
        given["choice"] = tuple(given["choice"])
    if given.get("json_object") is False:
        del given["json_object"]
    param = f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"
    return StructuredOutputs(**given, param=param)


class SamplingBody(RequestBody):
    """The sampling fields of one answer, in any API."""

    served_by: ClassVar[dict[str, str]] = FORMS

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
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
    structured_outputs: Annotated[Constraints, at_most(MAX_FIELDS)] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_id_keys(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise ValueError(f"'{clip(key, 20)}' is not a token id")
        return bias


class StreamOptions(StrictPart):
    """Options for additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _cut_length(length: int) -> int:
    if length < 1 and length != -1:
        raise ValueError("must be -1 (the size of the context) or at least 1")
    return length


class CutBody(Body):
    """Options for truncating a prompt. ``truncate_prompt_tokens`` -1 means the size of the context."""

    truncate_prompt_tokens: Annotated[int, AfterValidator(_cut_length)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _needs_a_length(self) -> Self:
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise refuse("it needs 'truncate_prompt_tokens'", at="truncation_side")
        return self

    def longest(self, max_model_len: int) -> int | None:
        """The number of tokens to which a prompt is cut in a context of ``max_model_len`` tokens, None for no limit."""
        return max_model_len if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def cut(self, token_ids: _Ids, max_model_len: int) -> _Ids:
        """The last ``truncate_prompt_tokens`` ids, or the first for the side "right"; all without a limit."""
        limit = self.longest(max_model_len)
        if limit is None or len(token_ids) <= limit:
            return token_ids
        return cast(_Ids, token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:])


class GenerationBody(SamplingBody, CutBody):
    """Fields that /v1/chat/completions and /v1/completions share."""

    served_by: ClassVar[dict[str, str]] = FORMS | dict.fromkeys(_LENGTHS, "max_tokens")

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[TokenIds | None, Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None

    def check(self, config: Config) -> None:
        super().check(config)
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
            if self.stream_options.include_obfuscation:
                raise unsupported("stream_options.include_obfuscation", "obfuscation is not supported; give false.")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("'prompt_logprobs' is not available in a stream.", param="prompt_logprobs")

    def longest(self, max_model_len: int) -> int | None:
        """As in CutBody. -1 leaves room for the requested answer, at least one token."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        asked = getattr(self, "max_completion_tokens", None) or self.max_tokens or 1
        return max(max_model_len - asked, 1)

    @property
    def options(self) -> StreamOptions:
        """``stream_options``, or its defaults."""
        return self.stream_options or StreamOptions()

    def sampling(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """SamplingParams by precedence: ``overrides``, the user's fields, the checkpoint's ``defaults``, OpenAI's.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name, None)) is not None}
        if self.logit_bias is not None:
            clamped = {int(key): max(-_MAX_BIAS, min(_MAX_BIAS, bias)) for key, bias in self.logit_bias.items()}
            given["logit_bias"] = clamped
        given["structured_outputs"] = structured_outputs_of(self.response_format, self.structured_outputs)
        given |= {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{**defaults, **given})

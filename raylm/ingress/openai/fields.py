"""Request bodies: pydantic models, and the conversion of their errors to error messages.

How a body is described:

 - A body is a Body, parsed by ``parse``, or by ``read`` if it may be large. An object in it is a TypedDict with
   ``@closed`` if the checked dict is used directly, or a StrictPart (a model) if it has rules or methods.
 - A union is ``Annotated[A | B, OneOf(...)]``. The Literals of one field, or the JSON types, select the member.
   ``param`` contains neither the tags of unions nor the names of models.
 - Requested options are checked strictly. The history of a conversation (messages, items of an input) is checked
   leniently: its objects are TypedDicts with ``@past`` in place of ``@closed``.
 - A rule is a validator that raises ValueError(rule) or ``refuse(rule, ...)``, also for several fields of an object
   (``at`` names the field to blame). ``param`` is then the dotted path. ``check`` of a body may also raise ``wrong``
   and ``unsupported`` with a written path.
 - Lists have ``fail_fast=True``, and objects that are not limited by StrictPart or OneOf have ``at_most(MAX_FIELDS)``.
   Otherwise pydantic collects an error for each entry, in one call that blocks all other threads.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend import LARGE
from raylm.ingress.http.errors import clip
from raylm.params import MAX_LOGPROBS

_EXPECTED = {
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number",
    "bool_type": "a boolean", "list_type": "an array", "dict_type": "an object", "model_type": "an object",
}  # fmt: skip
_JSON_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
_MAX_NAME = 64
_MAX_SHOWN_NAME = 100
_TAG = "\0"  # prefix of the tags of unions, which are omitted from paths
T = TypeVar("T")

MAX_STRING = 2048  # characters of a string that is tokenized on the event loop
MAX_FIELDS = 32  # of an object whose fields are all known


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def at_most(entries: int) -> BeforeValidator:
    """Limit the entries of an object before they are validated: pydantic validates all even if the first fails."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"it may hold at most {entries} entries")
        return value

    return BeforeValidator(check)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
Strings = Annotated[list[Annotated[str, Field(max_length=MAX_STRING)]], Field(fail_fast=True)]
StringOrStrings = Annotated[
    list[str], Field(fail_fast=True), BeforeValidator(_as_list, json_schema_input_type=str | list[str])
]
Prompt = str | list[int]

Model = Annotated[str, Field(description="A model or LoRA adapter; it may be left out where one model is served.")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotates a union. ``key`` is a field that is a Literal in each member.

    One member may allow any string in this field; it gets all strings that are not Literals of other members.
    ``refusal`` is the error for all other values, with ``{got}`` for the actual value. ``served`` is False if OpenAI's
    specification allows the value. If the field is missing or null, the value is ``default``.
    """

    refusal: str
    key: str = ""
    served: bool = True
    default: str | None = None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = self.members(union)
        tags = {tag: _TAG + tag for tag in members}

        def choose(value: object) -> str | None:
            if not self.key:
                return tags.get(json_name(value))
            if not isinstance(value, dict) or len(value) > MAX_FIELDS:
                return None
            tag = self.tag_of(value)
            return tags.get(tag, tags.get("")) if isinstance(tag, str) else None

        return core_schema.tagged_union_schema(
            {tags[tag]: _read(member, handler.generate_schema(member)) for tag, member in members.items()},
            choose,
            custom_error_type="one_of",
            custom_error_message=self.refusal,
            custom_error_context={"refusal": self.refusal, "key": self.key, "served": self.served},
        )

    def tag_of(self, value: Mapping[str, Any]) -> Any:
        """The value of the field ``key``; ``default`` if it is missing or null."""
        return self.default if value.get(self.key) is None else value[self.key]

    def members(self, union: Any) -> dict[str, Any]:
        """The types of ``union`` by tag. "" is the tag of the member that allows any string."""
        choices = get_args(union) if get_origin(union) in (Union, UnionType) else (union,)
        return {tag: member for member in choices for tag in self._tags(member)}

    def _tags(self, member: Any) -> tuple[str, ...]:
        bare = get_args(member)[0] if get_origin(member) is Annotated else member
        if self.key:
            literal = get_type_hints(bare)[self.key]
            tags = tuple(tag for part in (literal, *get_args(literal)) for tag in get_args(part) if type(tag) is str)
            return tags or ("",)
        kind = get_origin(bare) or bare
        return (_JSON_NAMES.get(str if kind is Literal else kind, "an object"),)


def _prompt_form(value: object) -> str | None:
    if not isinstance(value, list):
        return _TAG + "text" if isinstance(value, str) else None
    first = value[0] if value else 0
    return _TAG + ("texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids")


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) and isinstance(value[0], (str, list)) else [value]


_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_FORMS = "expected a string, an array of strings, an array of token ids, or an array of those, but got {got}"
_PromptForms = Annotated[
    Annotated[str, Tag(_TAG + "text")]
    | Annotated[list[str], Field(fail_fast=True), Tag(_TAG + "texts")]
    | Annotated[_Ids, Tag(_TAG + "ids")]
    | Annotated[list[_Ids], Field(fail_fast=True), Tag(_TAG + "lists")],
    Discriminator(
        _prompt_form,
        custom_error_type="one_of",
        custom_error_message=_FORMS,
        custom_error_context={"refusal": _FORMS, "key": "", "served": True},
    ),
    AfterValidator(_listed),
]
Prompts = Annotated[list[Prompt], GetPydanticSchema(lambda _, handler: handler.generate_schema(_PromptForms))]
"""Prompts in any of the four forms of a body."""


def refuse(rule: str, *, at: str = "", served: bool = True) -> PydanticCustomError:
    """The error of a validator, about the value or its field ``at``. ``served`` is as in OneOf."""
    return PydanticCustomError("refused", "refused", {"rule": rule, "at": at, "served": served})


class Body(BaseModel):
    """A JSON body. Types are strict ("1" is not an integer, true is not a number); unknown fields are errors.

    ``unserved`` are fields of OpenAI or other servers that are not supported. ``served_by`` maps other servers' names
    to the fields that replace them. In both, null is ignored. ``of_tools`` and ``of_reasoning`` are fields, or dotted
    paths of fields, that need a model with tool calls, or with reasoning.
    """

    model_config = _STRICT | ConfigDict(frozen=True, json_schema_extra={"additionalProperties": False})

    unserved: ClassVar[frozenset[str]] = frozenset()
    served_by: ClassVar[dict[str, str]] = {}
    of_tools: ClassVar[tuple[str, ...]] = ()
    of_reasoning: ClassVar[tuple[str, ...]] = ()

    _left_out: tuple[str, ...] = PrivateAttr(())

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of fields that were ignored, and of options that have no effect here."""
        return self._left_out

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Validate ``data``.

        Raises:
            UnsupportedFieldError: a field is unknown or not supported.
            InvalidRequestError: a value has a wrong type or is out of range; ``param`` is its dotted path.
        """
        known = cls.model_fields
        for name in data:
            if name not in known:
                cls._refuse(name, data[name])
        left_out: dict[str, None] = {}
        try:
            body = cls.model_validate(data, context=left_out)
        except ValidationError as error:
            raise _as_request_error(error.errors(include_url=False)[0]) from None
        body._left_out = tuple(left_out)
        return body

    @classmethod
    async def read(cls, data: Mapping[str, Any]) -> Self:
        """As ``parse``, on a thread if ``data`` is large."""
        return cls.parse(data) if count_entries(data) <= LARGE else await asyncio.to_thread(cls.parse, data)

    @classmethod
    def _refuse(cls, name: str, value: object) -> None:
        shown = clip(name, _MAX_NAME)
        if name in cls.served_by:
            if value is not None:
                message = f"'{shown}' is not a field of this server: use '{cls.served_by[name]}'."
                raise UnsupportedFieldError(message, param=shown)
            return
        if name in cls.unserved:
            if value is not None:
                raise UnsupportedFieldError(f"'{shown}' is not supported by this server.", param=shown)
            return
        near = difflib.get_close_matches(shown, cls.model_fields, n=1, cutoff=0.8)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UnsupportedFieldError(f"Unrecognized request argument: '{shown}'.{hint}", param=shown)


_CLOSED = _STRICT | ConfigDict(extra="forbid")
closed = with_config(_CLOSED)
"""Decorates a TypedDict that allows only its own fields."""


_EMPTY: tuple[object, ...] = (None, "", [], {})
_PLACES: dict[Any, str] = {}  # paths of the types of history


def past(place: str) -> Callable[[T], T]:
    """Decorates a TypedDict for history at the path ``place`` of a body.

    Other fields are dropped, and named in the body's ``left_out`` unless they are null or empty. This applies if OneOf
    selects the type, or if it has the annotation ``without_others``.
    """

    def decorate(kind: T) -> T:
        _PLACES[kind] = place
        return with_config(_STRICT)(kind)  # type: ignore[type-var]

    return decorate


def without_others(kind: Any) -> BeforeValidator:
    """Drop fields that a type of history does not have, and record their names, which pydantic would not do."""
    place, known = _PLACES[kind], kind.__required_keys__ | kind.__optional_keys__

    def leave_out(value: object, info: ValidationInfo) -> object:
        if type(value) is not dict or value.keys() <= known:
            return value
        for name, entry in value.items():
            if name not in known and entry not in _EMPTY:
                note_left_out(f"{place}.{name}", info)
        return {name: entry for name, entry in value.items() if name in known}

    return BeforeValidator(leave_out)


def _read(member: Any, schema: CoreSchema) -> CoreSchema:
    """The schema of a union's member. Drops other fields if the member is a type of history."""
    bare = get_args(member)[0] if get_origin(member) is Annotated else member
    if bare not in _PLACES:
        return schema
    return core_schema.with_info_before_validator_function(without_others(bare).func, schema)  # type: ignore[arg-type]


def note_left_out(path: str, info: ValidationInfo) -> None:
    """Add a field to the ``left_out`` of the body that is being parsed."""
    if info.context is not None:
        info.context[plain_name(path)] = None


def plain_name(path: str) -> str:
    """A path in a form that is safe for a header and a line of the log."""
    return re.sub(r"[^\x21-\x2b\x2d-\x7e]", "?", clip(path, _MAX_SHOWN_NAME))


def wish(path: str, *done: object) -> AfterValidator:
    """For a field with no effect here. Values other than ``done`` are recorded in ``left_out``."""

    def check(value: object, info: ValidationInfo) -> object:
        if value not in done:
            note_left_out(path, info)
        return value

    return AfterValidator(check)


def left_out_of_the_past(path: str) -> BeforeValidator:
    """For a field of history with no effect here. Any value becomes null, and is recorded in ``left_out``."""

    def check(value: object, info: ValidationInfo) -> None:
        if value not in _EMPTY:
            note_left_out(path, info)

    return BeforeValidator(check)


class StrictPart(BaseModel):
    """An object in a body that allows only its own fields."""

    model_config = _CLOSED | ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"it may hold at most {MAX_FIELDS} entries")
        return value


def _no_whole_vocabulary(value: object) -> object:
    if type(value) is int and value == -1:
        raise ValueError(f"-1, the whole vocabulary, is not supported; use at most {MAX_LOGPROBS}")
    return value


NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_no_whole_vocabulary)]


def unsupported(param: str, what: str) -> UnsupportedFieldError:
    """The error for a value that OpenAI's specification allows and this server does not support."""
    return UnsupportedFieldError(f"'{param}': {what}", param=param)


def wrong(param: str, rule: str) -> InvalidRequestError:
    """The error for a value that is invalid on any server."""
    return InvalidRequestError(f"Invalid value for '{param}': {rule}.", param=param)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields of a chat completion in errors to the fields of another API that they came from."""
    try:
        yield
    except InvalidRequestError as error:
        head, rest = re.match(r"([^.\[]*)(.*)", error.param or "", re.DOTALL).groups()  # type: ignore[union-attr]
        if head not in names:
            raise
        message = re.sub(rf"\b{head}\b", names[head], error.message)
        raise type(error)(message, param=names[head] + rest) from None


def dotted(path: tuple[int | str, ...]) -> str:
    """Convert ('messages', 0, 'content') to messages[0].content. Long keys are clipped."""
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{clip(part, _MAX_NAME)}"
        for part in path
        if isinstance(part, int) or not part.startswith(_TAG)
    )
    return text.removeprefix(".")


def json_name(value: object) -> str:
    """The JSON type of ``value``, with its article."""
    return "null" if value is None else _JSON_NAMES.get(type(value), "an object")


def count_entries(data: Mapping[str, Any]) -> int:
    """Number of entries of all objects and arrays in ``data``. Stops counting above LARGE."""
    count = 0
    left: list[Any] = [data]
    while left and count <= LARGE:
        holder = left.pop()
        count += len(holder)
        if count <= LARGE:
            items = holder.values() if isinstance(holder, dict) else holder
            left += [item for item in items if type(item) is dict or type(item) is list]
    return count


def _as_request_error(error: ErrorDetails) -> InvalidRequestError:
    path, kind, context, value = error["loc"], error["type"], error.get("ctx", {}), error["input"]
    if kind == "one_of":
        return _not_one_of(path, value, **context)
    if kind == "refused":
        param = dotted((*path, context["at"]) if context["at"] else path)
        return wrong(param, context["rule"]) if context["served"] else unsupported(param, context["rule"])
    param = dotted(path)
    if kind == "missing":
        return InvalidRequestError(f"Missing required parameter: '{param}'.", param=param)
    if kind == "extra_forbidden":
        return unsupported(param, "this field is not supported.")
    if _EXPECTED.get(kind) == "an integer" and isinstance(value, (int, float)) and abs(value) >= 2**63:
        return wrong(param, "it must be a 64-bit integer, from -2**63 to 2**63 - 1")
    if kind in _EXPECTED:
        return _wrong_type(param, f"expected {_EXPECTED[kind]}, but got {json_name(value)}")
    if kind == "too_short":
        return wrong(param, "it must not be empty")
    reason = str(context["error"]) if kind == "value_error" else error["msg"].removeprefix("Input ")
    return wrong(param, clip(reason, 300))


def _not_one_of(path: tuple[int | str, ...], value: Any, key: str, refusal: str, served: bool) -> InvalidRequestError:
    if not key:
        return _wrong_type(dotted(path), refusal.format(got=json_name(value)))
    if not isinstance(value, dict):
        return _wrong_type(dotted(path), f"expected an object, but got {json_name(value)}")
    if len(value) > MAX_FIELDS:
        return wrong(dotted(path), f"it may hold at most {MAX_FIELDS} entries")
    tag = value.get(key)
    param = dotted((*path, key))
    rule = refusal.format(got=f"'{clip(tag, 40)}'" if isinstance(tag, str) else json_name(tag))
    return wrong(param, rule) if served else unsupported(param, rule)


def _wrong_type(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid type for '{param}': {rule}.", param=param)

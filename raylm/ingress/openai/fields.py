"""Request bodies: the base that turns JSON into a checked object and every mistake into one sentence with a name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.ingress.http.errors import clip

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_JSON_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
_MAX_NAME = 64

MAX_STRING = 2048  # characters of a string that is tokenized on the event loop


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def at_most(entries: int) -> BeforeValidator:
    """A bound that is checked before an object's entries are: pydantic looks at all of them even if the first fails."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"it may hold at most {entries} entries")
        return value

    return BeforeValidator(check)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
Strings = Annotated[list[Annotated[str, Field(max_length=MAX_STRING)]], Field(fail_fast=True)]
StringOrStrings = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]


class Body(BaseModel):
    """A JSON body: types are strict ("1" is no integer, true no number) and unknown fields are refused by name.

    ``unserved`` are fields that OpenAI or other servers know and this one does not serve; null counts as not given.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": False},
    )

    unserved: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Check ``data``.

        Raises:
            UnsupportedFieldError: a field is unknown or not served.
            InvalidRequestError: a value has a wrong type or lies out of range; ``param`` is its dotted path.
        """
        known = cls.model_fields
        for name in data:
            if name not in known:
                cls._refuse(name, data[name])
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _as_request_error(error.errors(include_url=False)[0]) from None

    @classmethod
    def _refuse(cls, name: str, value: object) -> None:
        shown = clip(name, _MAX_NAME)
        if name in cls.unserved:
            if value is not None:
                raise UnsupportedFieldError(f"'{shown}' is not supported by this server.", param=shown)
            return
        near = difflib.get_close_matches(shown, cls.model_fields, n=1, cutoff=0.8)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UnsupportedFieldError(f"Unrecognized request argument: '{shown}'.{hint}", param=shown)


def unsupported(param: str, what: str) -> UnsupportedFieldError:
    """The refusal of a value that OpenAI's specification allows and this server does not serve."""
    return UnsupportedFieldError(f"'{param}': {what}", param=param)


def wrong(param: str, rule: str) -> InvalidRequestError:
    """The refusal of a value that no server could take."""
    return InvalidRequestError(f"Invalid value for '{param}': {rule}.", param=param)


def string_field(holder: Mapping[str, Any], name: str, path: str) -> str:
    """The string ``name`` of an object that stands at ``path`` of the body.

    Raises:
        InvalidRequestError: it is missing, or no string.
    """
    value = holder.get(name)
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", f"expected a string, but got {json_name(value)}")
    return value


def check_optional(holder: Mapping[str, Any], name: str, kind: type, expected: str, path: str) -> None:
    """Check the type of what may be missing of an object that stands at ``path``, or be null; ``expected`` in words.

    Raises:
        InvalidRequestError: it is there, and something else.
    """
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong(f"{path}.{name}", f"expected {expected}, but got {json_name(value)}")


def check_fields(holder: Mapping[str, Any], known: Set[str], path: str) -> None:
    """Refuse what an object at ``path`` of the body has besides its ``known`` fields.

    Raises:
        UnsupportedFieldError: naming the first of them.
    """
    for name in holder.keys() - known:
        raise unsupported(f"{path}.{clip(name, _MAX_NAME)}", "this field is not supported.")


def dotted(path: tuple[int | str, ...]) -> str:
    """('messages', 0, 'content') as messages[0].content; keys that a client made up are clipped."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{clip(part, _MAX_NAME)}" for part in path)
    return text.removeprefix(".")


def json_name(value: object) -> str:
    """What JSON calls ``value``, with its article."""
    return "null" if value is None else _JSON_NAMES.get(type(value), "an object")


def _as_request_error(error: ErrorDetails) -> InvalidRequestError:
    param, kind, context = dotted(error["loc"]), error["type"], error.get("ctx", {})
    if kind == "missing":
        return InvalidRequestError(f"Missing required parameter: '{param}'.", param=param)
    if kind == "extra_forbidden":
        return UnsupportedFieldError(f"Unrecognized request argument: '{param}'.", param=param)
    if kind in _EXPECTED:
        rule = f"expected {_EXPECTED[kind]}, but got {json_name(error['input'])}"
        return InvalidRequestError(f"Invalid type for '{param}': {rule}.", param=param)
    reason = str(context["error"]) if kind == "value_error" else error["msg"].removeprefix("Input ")
    return InvalidRequestError(f"Invalid value for '{param}': {clip(reason, 300)}.", param=param)

"""The four forms in which prompts come, told apart and checked."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import TypeAdapter, WithJsonSchema

from raylm.errors import InvalidRequestError
from raylm.ingress.openai.fields import json_name

Prompt = str | list[int]
# A field that split_prompts checks; pydantic would tell of the four forms' failures all at once.
Prompts = Annotated[Any, WithJsonSchema(TypeAdapter(str | list[str] | list[int] | list[list[int]]).json_schema())]


def split_prompts(value: object, param: str) -> list[Prompt]:
    """The prompts of a field: a string, an array of strings, an array of token ids, or an array of those.

    Raises:
        InvalidRequestError: ``value`` has none of the four forms; the field, or the entry of it, is named.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        expected = "expected a string, an array of strings, an array of token ids, or an array of those"
        raise InvalidRequestError(f"Invalid type for '{param}': {expected}, but got {json_name(value)}.", param=param)
    if not value:
        raise InvalidRequestError(f"'{param}' must not be an empty array.", param=param)
    if isinstance(value[0], str):
        _check_items(value, str, "a string", param)
        return cast(list[Prompt], value)
    if isinstance(value[0], list):
        _check_items(value, list, "an array", param)
        for index, item in enumerate(value):
            _check_token_ids(item, f"{param}[{index}]")
        return cast(list[Prompt], value)
    _check_token_ids(value, param)
    return [cast(list[int], value)]


def count_items(value: object) -> int:
    """Strings and token ids that checking the prompts of a field walks through."""
    if not isinstance(value, list):
        return 0
    return len(value) + sum(len(item) for item in value if isinstance(item, list))


def _check_token_ids(value: list[Any], param: str) -> None:
    if not value:
        raise InvalidRequestError(f"'{param}' must not be empty.", param=param)
    _check_items(value, int, "an integer", param)


def _check_items(value: list[Any], kind: type, expected: str, param: str) -> None:
    if all(type(item) is kind for item in value):
        return
    place = next(index for index, item in enumerate(value) if type(item) is not kind)
    where = f"{param}[{place}]"
    got = json_name(value[place])
    raise InvalidRequestError(f"Invalid type for '{where}': expected {expected}, but got {got}.", param=where)

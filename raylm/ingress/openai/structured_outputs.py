"""The fields that ask for the form of an answer, response_format and structured_outputs, and tool_choice."""

from __future__ import annotations

from typing import Any

from raylm.errors import InvalidRequestError
from raylm.frontend import NamedTool, ToolChoice
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import check_fields, check_optional, json_name, string_field, unsupported, wrong
from raylm.params import StructuredOutputs

_KINDS: dict[str, type | tuple[type, ...]] = {
    "json": (dict, bool, str),
    "regex": str,
    "choice": list,
    "grammar": str,
    "json_object": bool,
}
_FORMATS = ("text", "json_object", "json_schema")


def form_of(response_format: dict[str, Any] | None, structured: dict[str, Any] | None) -> StructuredOutputs | None:
    """What both fields ask for, None for free text.

    Raises:
        InvalidRequestError: they are wrong, or both ask for something; ``param`` is the dotted path.
    """
    by_format = None if response_format is None else _response_format(response_format)
    if structured is None:
        return by_format
    if by_format is not None:
        message = "'structured_outputs' and 'response_format' must not both say what form the answer has."
        raise InvalidRequestError(message, param="structured_outputs")
    return _structured_outputs(structured)


def tool_choice_of(value: object, tools: list[dict[str, Any]] | None) -> ToolChoice:
    """``tool_choice``, for these tools.

    Raises:
        InvalidRequestError: it is wrong, or names or needs a tool that there is not.
    """
    if value is None or value == "auto" or value == "none":
        return "none" if value == "none" else "auto"
    if value != "required" and not isinstance(value, dict):
        shown = f"'{clip(value, 30)}'" if isinstance(value, str) else json_name(value)
        raise wrong("tool_choice", f"expected none, auto, required or a function, but got {shown}")
    if not tools:
        raise InvalidRequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if value == "required":
        return "required"
    assert isinstance(value, dict)
    name = _named_function(value)
    if name not in {tool["function"]["name"] for tool in tools}:
        raise wrong("tool_choice.function.name", f"there is no tool '{clip(name, 64)}'")
    return NamedTool(name)


def _named_function(value: dict[str, Any]) -> str:
    if value.get("type") != "function":
        raise unsupported("tool_choice.type", "only function is supported.")
    check_fields(value, {"type", "function"}, "tool_choice")
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong("tool_choice.function", f"expected an object, but got {json_name(function)}")
    check_fields(function, {"name"}, "tool_choice.function")
    return string_field(function, "name", "tool_choice.function")


def _response_format(chosen: dict[str, Any]) -> StructuredOutputs | None:
    kind = chosen.get("type")
    if kind not in _FORMATS:
        raise unsupported("response_format.type", f"only {', '.join(_FORMATS)} are supported.")
    check_fields(chosen, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, param="response_format")
    named, path = chosen.get("json_schema"), "response_format.json_schema"
    if not isinstance(named, dict):
        raise wrong(path, f"expected an object, but got {json_name(named)}")
    check_fields(named, {"name", "description", "schema", "strict"}, path)
    string_field(named, "name", path)
    check_optional(named, "description", str, "a string", path)
    check_optional(named, "strict", bool, "a boolean", path)
    schema = named.get("schema")
    if schema is None:
        return StructuredOutputs(json_object=True, param=f"{path}.schema")
    if not isinstance(schema, dict):
        raise wrong(f"{path}.schema", f"expected an object, but got {json_name(schema)}")
    return StructuredOutputs(json=schema, param=f"{path}.schema")


def _structured_outputs(asked: dict[str, Any]) -> StructuredOutputs:
    check_fields(asked, set(_KINDS), "structured_outputs")
    given = {name: value for name, value in asked.items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    for name, value in given.items():
        if not isinstance(value, _KINDS[name]):
            raise wrong(f"structured_outputs.{name}", f"its type is not right: {json_name(value)}")
    if "choice" in given:
        if not all(isinstance(choice, str) for choice in given["choice"]):
            raise wrong("structured_outputs.choice", "expected an array of strings")
        given["choice"] = tuple(given["choice"])
    param = f"structured_outputs.{next(iter(given))}" if len(given) == 1 else "structured_outputs"
    return StructuredOutputs(**given, param=param)

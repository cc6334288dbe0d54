"""Calls in XML, <function=name><parameter=key>value</parameter></function>: Qwen3-Coder and its successors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import orjson

from raylm.frontend.answers.tool_parsers.hermes import HermesParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MOST_SCHEMAS = 64  # schemas read to find the types of one parameter


class Qwen3CoderParser(HermesParser):
    """Parses calls in XML. Values have no quotes, so the schema decides their type. Arguments are returned one by one.

    A JSON object in place of the XML is parsed in Hermes' format. Forced calls use that format, because a grammar can
    match JSON with a schema, but not an unquoted string with a pattern and a length.
    """

    _parameters_schema: Any  # schema of the called function's parameters
    _before: str  # text before its next argument

    @classmethod
    def serves(cls, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def _call(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "{":
            return super()._call()
        if not self._buffer.startswith(_FUNCTION[: len(self._buffer)]):
            self._add_content(self.marker)
            self._state = self._text
            return True
        return self._function()

    def _function(self) -> bool:
        head, found, rest = self._buffer.partition(">")
        if not found:
            return False
        name = head.removeprefix(_FUNCTION).strip()
        self._parameters_schema = self._tools.get(name)
        self._open_call(name)
        self._before, self._buffer, self._state = "{", rest, self._parameters
        return True

    def _parameters(self) -> bool:
        """State: between parameters. Next is a parameter or the end of the function."""
        if not self._skip_space():
            return False
        if self._buffer.startswith(_PARAMETER):
            return self._parameter()
        if any(marker.startswith(self._buffer) for marker in (_PARAMETER, _FUNCTION_END) if marker != self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(_FUNCTION_END)
        self._add_arguments("{}" if self._before == "{" else "}")
        self.over = self._one_call
        self._state = self._closing
        return True

    def _parameter(self) -> bool:
        """State: one whole parameter."""
        at = self._buffer.find(_PARAMETER_END)
        if at < 0:
            return False
        key, _, value = self._buffer[len(_PARAMETER) : at].partition(">")
        self._buffer = self._buffer[at + len(_PARAMETER_END) :]
        self._add_arguments(f"{self._before}{_dumped(key.strip())}: {self._typed(key.strip(), value)}")
        self._before = ", "
        return True

    def _end(self) -> None:
        super()._end()
        if self._state == self._parameters:
            self._buffer = ""  # a cut parameter, which belongs to the call

    def _typed(self, key: str, text: str) -> str:
        """A value as JSON: a string if the schema says so or the text is not JSON, else the text itself."""
        text = text.removeprefix("\n").removesuffix("\n")
        kinds, written = _kinds(self._parameters_schema, key), text.strip()
        if kinds == {"string"}:
            return _dumped(text)
        try:
            value = orjson.loads(written)
        except orjson.JSONDecodeError:
            value = {"True": True, "False": False, "None": None}.get(written, text)
            written = _dumped(value)
        if "string" in kinds and not isinstance(value, str) and not (value is None and "null" in kinds):
            return _dumped(text)
        return written


def _kinds(parameters: Any, key: str) -> set[str]:
    """The types of the parameter ``key`` in the schema of all ``parameters``; empty if none is given."""
    found: set[str] = set()
    for whole in _meant_by(parameters, parameters):
        properties = whole.get("properties")
        if isinstance(properties, dict):
            for schema in _meant_by(properties.get(key), parameters):
                found |= _own_kinds(schema)
    return found


def _own_kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a schema itself gives, by ``type`` or by an enum or constant of strings."""
    types, values = schema.get("type", []), schema.get("enum", [schema["const"]] if "const" in schema else None)
    found = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    if not found and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found


def _meant_by(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema, its alternatives, and the schemas that they refer to within ``root``, each once.

    The client's schema is not checked: a value may be of any type, and a schema may refer to itself.
    """
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < _MOST_SCHEMAS:
        if not isinstance(one := waiting.pop(), dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(reference := one.get("$ref"), str):
            waiting.append(_referred(reference, root))
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := one.get(name), list):
                waiting += choices[:_MOST_SCHEMAS]


def _referred(reference: str, root: Any) -> Any:
    """The schema at a JSON pointer (RFC 6901) in ``root``, such as #/$defs/Name; None if the pointer is wrong."""
    start, *path = reference.split("/")
    found = root if start == "#" else None
    for name in path:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()

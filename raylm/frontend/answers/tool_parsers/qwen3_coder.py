"""Calls in XML, <function=name><parameter=key>value</parameter></function>: Qwen3-Coder and its successors."""

from __future__ import annotations

from typing import Any

import orjson

from raylm.frontend.answers.tool_parsers.hermes import HermesParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(HermesParser):
    """Parses calls in XML. Values have no quotes, so the schema decides their type. Arguments are returned one by one.

    A JSON object in place of the XML is parsed in Hermes' format. Forced calls use that format, because a grammar can
    match JSON with a schema, but not an unquoted string with a pattern and a length.
    """

    _properties: dict[str, Any]  # properties in the schema of the called function
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
        properties = self._tools.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
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
        self._add_arguments(f"{self._before}{_dumped(key.strip())}: {_dumped(self._typed(key.strip(), value))}")
        self._before = ", "
        return True

    def _typed(self, key: str, text: str) -> Any:
        """Convert a value: to a string if the schema says so or the text is not JSON, else from JSON."""
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._properties.get(key)  # not checked: may be of any type
        kinds = _kinds(schema)
        if kinds == {"string"}:
            return text
        try:
            value = orjson.loads(text.strip())
        except orjson.JSONDecodeError:
            value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        if "string" in kinds and not isinstance(value, str) and not (value is None and "null" in kinds):
            return text
        return value


def _kinds(schema: Any) -> set[str]:
    """The types in a schema, its alternatives, or an enum of strings; empty if none is given."""
    if not isinstance(schema, dict):
        return set()
    types, values = schema.get("type", []), schema.get("enum")
    found = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        for choice in schema[name] if isinstance(schema.get(name), list) else []:
            if isinstance(choice, dict):  # ignores its alternatives: a schema may be deep
                found |= _kinds({key: choice[key] for key in ("type", "enum") if key in choice})
    if not found and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()

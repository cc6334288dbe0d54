"""Calls in XML, <function=name><parameter=key>value</parameter></function>: Qwen3-Coder and its successors."""

from __future__ import annotations

from typing import Any

import orjson

from raylm.frontend.answers.tool_parsers.hermes import HermesParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(HermesParser):
    """Values are written bare; which of them are strings stands in the schema. They are given out one by one.

    An object in place of the XML is read in Hermes' form, which calls that must come are made to have: a grammar can
    hold JSON to a schema, but not a bare string to its pattern and length.
    """

    _properties: dict[str, Any]  # of the function that is called
    _before: str  # what stands before its next argument

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
        """Between parameters: the next one, or the end of the function."""
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
        """One whole parameter."""
        at = self._buffer.find(_PARAMETER_END)
        if at < 0:
            return False
        key, _, value = self._buffer[len(_PARAMETER) : at].partition(">")
        self._buffer = self._buffer[at + len(_PARAMETER_END) :]
        self._add_arguments(f"{self._before}{_dumped(key.strip())}: {_dumped(self._typed(key.strip(), value))}")
        self._before = ", "
        return True

    def _typed(self, key: str, text: str) -> Any:
        """A bare value: a string where the schema says so, or where it is no JSON."""
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._properties.get(key)  # which may be true or false, or anything: it is not checked
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
    """The types that a schema names, itself, in its alternatives or by an enum of strings; empty if none."""
    if not isinstance(schema, dict):
        return set()
    types, values = schema.get("type", []), schema.get("enum")
    found = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        for choice in schema[name] if isinstance(schema.get(name), list) else []:
            if isinstance(choice, dict):  # whose own alternatives are left out: a schema may be deep
                found |= _kinds({key: choice[key] for key in ("type", "enum") if key in choice})
    if not found and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()

"""bounded_form: the requested form of an answer as plain JSON, if its size and depth are within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from raylm.params import MAX_GRAMMAR_CHARS, StructuredOutputs

MAX_VALUES = 20_000
"""Limit on the objects, arrays, strings and numbers in a JSON schema."""
MAX_DEPTH = 100
"""Limit on the nesting of a JSON schema. The reader of llguidance fails at 127."""
MAX_LITERAL_CHARS = 4_096
"""Limit on one text that an answer is compared with. Computing a mask takes 1 ms for every 1,000 characters."""
MAX_RULES = 2_000
"""Limit on the rules of a grammar. Reading GBNF takes time quadratic in the rules."""

_NOT_LITERALS = {"description", "title", "$comment", "$schema", "$id", "examples", "default"}
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)*+/')

Form = tuple[str, Any]
"""A field of StructuredOutputs and its value. A JSON schema is text."""


def bounded_form(spec: StructuredOutputs) -> Form:
    """The form that ``spec`` asks for. Takes time proportional to the limits, not to the size of ``spec``.

    Raises:
        ValueError: it exceeds a limit, or is not JSON.
    """
    if spec.json_object:
        return "json_object", True
    if spec.json is not None:
        return "json", _bounded_json(spec.json)
    if spec.choice is not None:
        _at_most(sum(map(len, spec.choice)), MAX_GRAMMAR_CHARS, "characters in all")
        _at_most(max(map(len, spec.choice)), MAX_LITERAL_CHARS, "characters in a choice")
        return "choice", list(spec.choice)
    if spec.regex is not None:
        _at_most(len(spec.regex), MAX_LITERAL_CHARS, "characters in a regular expression")
        return "regex", spec.regex
    assert spec.grammar is not None
    _at_most(len(spec.grammar), MAX_GRAMMAR_CHARS, "characters")
    if not spec.grammar.strip():
        raise ValueError("it is empty.")
    _at_most(max(spec.grammar.count("::="), spec.grammar.count("\n")), MAX_RULES, "rules or lines")
    longest = max((len(found.group()) for found in _LITERAL.finditer(spec.grammar)), default=0)
    _at_most(longest, MAX_LITERAL_CHARS, "characters in a string or regular expression")
    return "grammar", spec.grammar


def _bounded_json(given: Any) -> str:
    text = given
    if isinstance(given, str):
        _at_most(len(given), MAX_GRAMMAR_CHARS, "characters")
        try:
            given = json.loads(given)
        except RecursionError:
            raise ValueError("it is nested too deeply.") from None
    _check_values(given)
    if not isinstance(text, str):
        text = json.dumps(given)
        _at_most(len(text), MAX_GRAMMAR_CHARS, "characters")
    return text


def _check_values(schema: Any) -> None:
    """Count the values of ``schema``, up to the limits."""
    seen, level = 0, [schema]
    for _ in range(MAX_DEPTH):
        seen += len(level)
        _at_most(seen, MAX_VALUES, "values")
        longest = max(map(len, chain.from_iterable(map(_texts, level))), default=0)
        _at_most(longest, MAX_LITERAL_CHARS, "characters in a text")
        level = list(chain.from_iterable(map(_parts, level)))
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep.")


def _parts(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()


def _texts(node: Any) -> Iterable[str]:
    """The texts of one value that an answer may be compared with."""
    if isinstance(node, dict):
        said = (value for key, value in node.items() if key not in _NOT_LITERALS)
        return chain(node, (value for value in said if isinstance(value, str)))
    return (part for part in _parts(node) if isinstance(part, str))


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"it is too large: at most {most:,} {what}.")

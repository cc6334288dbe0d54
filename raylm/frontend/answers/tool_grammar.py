"""The grammars of answers in which tools are called: each call as the model's family writes it, arguments by schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from raylm.frontend.answers.tool_parsers import ToolParser
from raylm.frontend.answers.tool_parsers.base import Mark
from raylm.params import LARK, StructuredOutputs

MOST_CALLS = 16
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False}

Functions = Sequence[tuple[str, Mapping[str, Any]]]


def calls_grammar(
    parser: type[ToolParser], functions: Functions, mark: Mark, *, parallel: bool, start: str = "calls"
) -> str:
    """Lark of an answer made of calls of ``functions`` (name, schema of the parameters), at most ``MOST_CALLS``.

    ``start`` is the answer in terms of the rules ``calls`` and ``TEXT``. Arguments are spaced as chat templates space
    JSON: a model goes on best in the form that it has read.
    """
    call, between, rules = parser.rules([name for name, _ in functions], mark)
    more = f"({between} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
    lines = [f"start: {start}", f"calls: call {more}", f"call: {call}", rules]
    lines += [f"args_{i}: %json {_schema(schema)}" for i, (_, schema) in enumerate(functions)]
    return LARK + "\n".join([*lines, "TEXT: /(.|\\n)+/" if "TEXT" in start else ""])


def calls_or_answer(
    parser: type[ToolParser], functions: Functions, mark: Mark, *, parallel: bool, answer: StructuredOutputs
) -> str:
    """Lark of either calls or an answer in JSON."""
    schema = answer.json if answer.json is not None else {"type": "object"}
    found: Any = json.loads(schema) if isinstance(schema, str) else schema
    text = json.dumps({"x-guidance": _COMPACT, **found} if isinstance(found, dict) else found)
    calls = calls_grammar(parser, functions, mark, parallel=parallel, start="calls | answer")
    return f"{calls}\nanswer: %json {text}"


def _schema(parameters: Mapping[str, Any]) -> str:
    return json.dumps({"type": "object", "x-guidance": _SPACED, **parameters})

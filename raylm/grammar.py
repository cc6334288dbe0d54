"""llguidance's grammars, limits and tokenizer, for the grammar server and the worker."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from raylm.checkpoint import read_object
from raylm.finite_schema import has_finite_value
from raylm.params import LARK, StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""JSON without insignificant white space, unless a schema says otherwise."""


@cache
def limits() -> LLParserLimits:
    """Limits of a grammar and of each step, far above the needs of usual schemas. A larger step fails its sequence."""
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def load_tokenizer(path: Path, eos_token_ids: tuple[int, ...], vocab_size: int | None = None) -> LLTokenizer:
    """Load llguidance's tokenizer. 150,000 tokens take 0.3 s and 100 MB.

    ``vocab_size`` is the number of logits; by default the number of tokens. Added tokens without a logit, as a padding
    token of training, are left out.
    """
    file = path / "tokenizer.json"
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError:
        content = read_object(file)
        tokens = content.get("added_tokens") or []
        kept = [token for token in tokens if vocab_size is None or token["id"] < vocab_size]
        if len(kept) == len(tokens):
            raise
    text = json.dumps(content | {"added_tokens": kept})
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def grammar_of(spec: StructuredOutputs) -> str:
    """Convert a structured output specification to llguidance's grammar.

    Raises:
        ValueError: the schema is not valid JSON or has no finite value, or the grammar is neither Lark nor GBNF.
    """
    if spec.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=COMPACT)
    if spec.json is not None:
        text = spec.json if isinstance(spec.json, str) else json.dumps(spec.json)
        if not has_finite_value(json.loads(text)):
            raise ValueError("no finite JSON value matches it: a required value contains itself.")
        return LLMatcher.grammar_from_json_schema(text, defaults=COMPACT)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    assert spec.grammar is not None
    return LLMatcher.grammar_from_lark(_as_lark(spec.grammar))


def _as_lark(text: str) -> str:
    if text.startswith(LARK):
        return text
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from error
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None
    except Exception as error:  # llguidance has no exception class for missing or unclosed rules
        raise ValueError(f"it is not GBNF: {error}") from error


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher before its first token. ``is_error`` is true if the grammar cannot be used."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits())

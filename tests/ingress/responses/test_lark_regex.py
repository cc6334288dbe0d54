"""Lark grammars as regular expressions, compared with example texts and llguidance's Lark, and reasons of refusals."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from raylm.ingress.responses.lark_regex import regex_of
from raylm.ingress.responses.tools import callables

# A grammar like that of a coding agent's tool for patches.
PATCH = r"""
start: begin_patch environment? hunk+ end_patch
begin_patch: "*** Begin Patch" LF
environment: "*** Environment ID: " filename LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
BYTES = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Whether llguidance accepts the whole text."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def schema_of(syntax: str, definition: str) -> str:
    """The grammar of the arguments of the function that represents a custom tool."""
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    (tool,) = callables([{"type": "custom", "name": "t", "format": form}])  # type: ignore[typeddict-item]
    return str(LLMatcher.grammar_from_json_schema(json.dumps(tool.as_function()["function"]["parameters"])))


def in_json(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


GOOD = [
    '*** Begin Patch\n*** Add File: a.txt\n+one "q" \\ ö\n+\n*** End Patch\n',
    "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f\n-x\n+y\n z\n*** End of File\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a\n*** Update File: b\n@@\n-x\n*** End Patch\n",
]
BAD = [
    "", "*** Begin Patch\n*** End Patch\n", GOOD[0].replace("+one", "one"), GOOD[0] + "more", "x" + GOOD[1],
    GOOD[2].replace("@@", "@"),
]  # fmt: skip


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_the_arguments_of_a_patch(text: str) -> None:
    assert bool(re.fullmatch(regex_of(PATCH), text)) == (text in GOOD)
    assert accepts(schema_of("lark", PATCH), in_json(text)) == (text in GOOD)


def test_a_regex_holds_the_whole_text() -> None:
    schema = schema_of("regex", "[0-9]+")
    assert accepts(schema, in_json("12"))
    assert not accepts(schema, in_json("a12b"))
    alternatives = schema_of("regex", "a|b")
    assert [text for text in ("a", "b", "ab", "xb", "") if accepts(alternatives, in_json(text))] == ["a", "b"]


RULES = [
    ('start: "a"~2..3 [B] ("c" | D)*\nB: "b"i\nD: "0".."3"', "aabcc0123"),
    ('start: x\n ?x: y "," y\n _z: "z"\n y: _z+ | /[0-9]{2}/ -> number', "zz,01"),
    ("start: INT WS_INLINE WORD // a comment\n%import common (INT, WORD)\n%import common.WS_INLINE", "12 ab"),
    ('start: "\\n\\t\\"\\\\" | /\\/[a-f]/', "/a"),
]


@pytest.mark.parametrize(("grammar", "taken"), RULES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_texts_near_it_are_taken_as_by_llguidances_lark(grammar: str, taken: str, data: st.DataObject) -> None:
    regex = re.compile(regex_of(grammar))
    assert regex.fullmatch(taken)
    letters = st.sampled_from(sorted({*taken, "b", "B", "x", "\n"}))
    text = list(taken)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 1))] = data.draw(st.lists(letters, max_size=2))
    drawn = "".join(text)
    plain = grammar.replace("[B]", "B?").replace(
        "%import common (INT, WORD)", "%import common.INT\n%import common.WORD"
    )
    plain = re.sub(r" -> \w+", "", plain).replace('"a"~2..3', '"a" "a" "a"?').replace("?x:", "x:")
    assert bool(regex.fullmatch(drawn)) == accepts(LLMatcher.grammar_from_lark(plain), drawn), drawn


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "recursive"),
        ('start: a\na: b+\nb: "x" | "[" a "]"', "recursive"),
        ('x: "a"', "no rule 'start'"),
        ("start: missing", "no rule 'missing'"),
        ('start: "a"\nstart: "b"', "two rules"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("%import python.NAME\nstart: NAME", "common"),
        ("%import common.UNHEARD\nstart: UNHEARD", "UNHEARD"),
        ('start: ("a"', "closed"),
        ('start: "a" )', "not supported"),
        ('start: x{"a"}\nx{y}: y', "expected a rule"),
        ("start: 'a'", "cannot be read"),
        ("start: ?", "not supported"),
        ("start: " + '"a" ' * 5000, "parts"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "levels"),
        ("".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "a"\nstart: r0', "characters"),
        ("", "no rule"),
    ],
)
def test_what_is_no_regular_grammar_is_refused_by_its_reason(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        regex_of(grammar)


@given(st.text("start: ab\"'/|()[]?*+~.0-9\n%import\\", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ValueError):
        regex_of("start: " + text)

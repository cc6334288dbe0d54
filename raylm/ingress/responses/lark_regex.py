"""Converts the grammar of a custom tool from Lark to a regular expression.

A custom tool's text is a string in JSON, in which quotes and line ends are escaped. llguidance escapes a regular
expression, but not a grammar with rules. Grammars without recursion, such as those of patches, are regular, and are
converted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_TOKENS = 4_096
_MOST_DEPTH = 64
MOST_CHARS = 4_096  # of the expression, as of any other
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r",
    "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\r]+|//[^\n]*|\#[^\n]*)|(?P<line>\n\s*)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)"""
    r"""|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)*/[imslux]*)|(?P<import>%import\b)|(?P<directive>%[a-z]+)"""
    r"""|(?P<name>[?!]*_?[A-Za-z][A-Za-z0-9_]*)|(?P<range>~[ ]*[0-9]+(?:[ ]*\.\.[ ]*[0-9]+)?|\.\.)|(?P<number>[0-9]+)"""
    r"""|(?P<sign>->|[:|()\[\]?*+.,{}])"""
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "\\": "\\", '"': '"', "'": "'"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def regex_of(grammar: str) -> str:
    """The regular expression of the texts that the rule ``start`` of a Lark grammar matches.

    Raises:
        ValueError: the grammar is wrong, is recursive, or uses what has no place in a regular expression.
    """
    found = _Reader(list(_tokens(grammar))).rules()
    if "start" not in found:
        raise ValueError("there is no rule 'start'")
    return _Expander(found).expand("start", ())


def _tokens(grammar: str) -> Iterator[_Token]:
    place = count = depth = 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        if match is None or match.lastgroup is None:
            raise ValueError(f"it cannot be read from {grammar[place : place + 20]!r} on")
        count += 1
        if count > _MOST_TOKENS:
            raise ValueError(f"it has more than {_MOST_TOKENS} parts")
        kind, text, place = match.lastgroup, match.group(), match.end()
        depth += (text in ("(", "[")) - (text in (")", "]"))
        if kind != "space" and not (kind == "line" and depth):
            yield _Token(kind, text)
    yield _Token("line", "\n")
    yield _Token("end", "")


Rule = list[_Token]


class _Reader:
    """Splits a grammar into rules: the tokens behind the colon, by name."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens

    def rules(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        for line in self._lines():
            if line[0].kind == "import":
                self._import(line, found)
                continue
            if line[0].kind == "directive":
                raise ValueError(f"{line[0].text} is not supported; write out what may stand between the parts")
            name = line[0].text.lstrip("?!")
            at = next((place for place, token in enumerate(line) if token.text == ":"), 0)
            if line[0].kind != "name" or not at or any(token.text in "{}," for token in line[1:at]):
                raise ValueError(f"expected a rule, but got {line[0].text!r}")
            if name in found:
                raise ValueError(f"there are two rules '{name}'")
            found[name] = line[at + 1 :]
        return found

    def _lines(self) -> Iterator[Rule]:
        """Rules and directives. A line that begins with | continues the rule before it."""
        line: Rule = []
        for place, token in enumerate(self._tokens):
            if token.kind == "end":
                break
            if token.kind != "line":
                line.append(token)
            elif line and self._tokens[place + 1].text != "|":
                yield line
                line = []

    def _import(self, line: Rule, found: dict[str, Rule]) -> None:
        words = [token.text for token in line[1:] if token.text not in (".", "(", ")", ",")]
        if not words or words[0] != "common":
            raise ValueError("only what is in 'common' can be imported")
        alias = words[words.index("->") + 1] if "->" in words else None
        for name in words[1 : words.index("->") if "->" in words else None]:
            if name not in _COMMON:
                raise ValueError(f"common.{name} is not supported")
            found[alias or name] = [_Token("regex", f"/{_COMMON[name]}/")]


class _Expander:
    """Puts the rules into each other."""

    def __init__(self, rules: dict[str, Rule]) -> None:
        self._rules = rules
        self._done: dict[str, str] = {}

    def expand(self, name: str, above: tuple[str, ...]) -> str:
        """The expression of a rule that the rules ``above`` use."""
        if name in above:  # a group in it is "(", which no rule is named
            raise ValueError(f"the rule '{name}' is recursive; only grammars without recursion are supported")
        if name not in self._rules:
            raise ValueError(f"there is no rule '{name}'")
        if name not in self._done:
            tokens = self._rules[name]
            text, place = self._choice(tokens, 0, (*above, name))
            if place != len(tokens):
                raise ValueError(f"{tokens[place].text!r} is not supported in the rule '{name}'")
            self._done[name] = text
        return self._done[name]

    def _choice(self, tokens: Rule, place: int, above: tuple[str, ...]) -> tuple[str, int]:
        if len(above) > _MOST_DEPTH:
            raise ValueError(f"its rules use each other in more than {_MOST_DEPTH} levels")
        ways = []
        while True:
            way, place = self._sequence(tokens, place, above)
            ways.append(way)
            if place == len(tokens) or tokens[place].text != "|":
                break
            place += 1
        text = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
        if len(text) > MOST_CHARS:
            raise ValueError(f"as a regular expression it has more than {MOST_CHARS:,} characters")
        return text, place

    def _sequence(self, tokens: Rule, place: int, above: tuple[str, ...]) -> tuple[str, int]:
        parts = []
        while place < len(tokens) and tokens[place].text not in ("|", ")", "]"):
            if tokens[place].text == "->":  # the name of an alternative, which is for trees
                place += 2
                continue
            part, place = self._atom(tokens, place, above)
            while place < len(tokens) and (tokens[place].text in ("?", "*", "+") or tokens[place].text[0] == "~"):
                part, place = _repeated(part, tokens[place].text), place + 1
            parts.append(part)
        return "".join(parts), place

    def _atom(self, tokens: Rule, place: int, above: tuple[str, ...]) -> tuple[str, int]:
        token = tokens[place]
        if token.kind == "name":
            return self.expand(token.text.lstrip("?!"), above), place + 1
        if token.kind == "regex":
            return _grouped_regex(token.text), place + 1
        if token.kind == "string":
            if place + 2 < len(tokens) and tokens[place + 1].text == "..":
                first, last = _string(token.text), _string(tokens[place + 2].text)
                return f"[{re.escape(first)}-{re.escape(last)}]", place + 3
            text = re.escape(_string(token.text))
            return f"(?i:{text})" if token.text.endswith("i") else text, place + 1
        if token.text in ("(", "["):
            text, end = self._choice(tokens, place + 1, (*above, "("))
            if end == len(tokens) or tokens[end].text != {"(": ")", "[": "]"}[token.text]:
                raise ValueError(f"{token.text!r} is not closed")
            return f"(?:{text})" + ("?" if token.text == "[" else ""), end + 1
        raise ValueError(f"{token.text!r} is not supported")


def _repeated(part: str, sign: str) -> str:
    if sign[0] == "~":
        sign = "{" + sign[1:].replace(" ", "").replace("..", ",") + "}"
    return f"(?:{part}){sign}"


def _grouped_regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    if set(flags) - set("imsx"):
        raise ValueError(f"the flags {flags!r} of a regular expression are not supported")
    return f"(?{flags}:{body})".replace("\\/", "/")


def _string(text: str) -> str:
    body = text[1 : text.rindex('"')]

    def plain(found: re.Match[str]) -> str:
        if found[1] not in _ESCAPES:
            raise ValueError(f"the escape {found[0]} in a string is not supported")
        return _ESCAPES[found[1]]

    return re.sub(r"\\(.)", plain, body)

"""JSONCallsParser, the base of parsers for calls as JSON objects, and scanners for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence

import orjson

from raylm.frontend.answers.tool_parsers.base import MarkedCallsParser

_ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of one JSON value by brackets and strings. Does not check the value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def push(self, text: str, start: int = 0) -> int:
        """Read ``text`` from ``start`` on. The first call must start at the value's first character.

        Returns the index after the value, or the text's length if the value continues.
        """
        for place in range(start, len(text)):
            char = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif self._scalar:
                self.done = char in ",]} \t\r\n"
                if self.done:
                    return place
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
            elif not self._depth:
                self._scalar = True
            if not (self._depth or self._in_string or self._scalar):
                self.done = True
                return place + 1
        return len(text)


class CallScanner:
    """Reads one object {"name": …, "arguments": {…}} while it arrives. Ignores other keys."""

    def __init__(self) -> None:
        self.name: str | None = None  # name of the function, when it is complete
        self.done = False  # the object is closed
        self.failed = False  # the text is not such an object
        self._read: list[str] = []
        self._piece, self._place = "", 0
        self._arguments = ""
        self._given = False
        self._steps = self._object()

    def push(self, text: str) -> int:
        """Read the next piece. Returns the number of characters of ``text`` that belong to the object."""
        self._piece, self._place = text, 0
        next(self._steps, None)
        self._read.append(text[: self._place])
        return self._place

    @property
    def text(self) -> str:
        """All text read so far, unchanged."""
        return "".join(self._read)

    def take_arguments(self) -> str:
        """The text of arguments since the last call. An object without arguments has ``{}``."""
        if self.done and not self._given:
            self._give("{}")
        taken, self._arguments = self._arguments, ""
        return taken

    def _object(self) -> Generator[None, None, None]:
        """Read the whole object. This generator and its helpers yield when they need the next piece."""
        self.failed = (yield from self._peek()) != "{"
        self._place += not self.failed
        while not (self.failed or self.done):
            char = yield from self._peek()
            if char == '"':
                yield from self._member()
            else:
                self.done, self.failed = char == "}", char not in ",}"
                self._place += not self.failed

    def _member(self) -> Generator[None, None, None]:
        key = _loaded_string((yield from self._value()))
        self.failed = (yield from self._peek()) != ":"
        self._place += 1
        if self.failed:
            return
        yield from self._peek()
        value = yield from self._value(gives_object=key in _ARGUMENT_KEYS)
        if key == "name":
            self.name = _loaded_string(value)
            self.failed = self.name is None
        elif key in _ARGUMENT_KEYS and value != "{":
            self._give("{}" if value == "null" else _loaded_string(value) or value)  # some models write it as a string

    def _peek(self) -> Generator[None, None, str]:
        """The next character that is not white space."""
        while True:
            while self._place < len(self._piece):
                if not self._piece[self._place].isspace():
                    return self._piece[self._place]
                self._place += 1
            yield

    def _value(self, *, gives_object: bool = False) -> Generator[None, None, str]:
        """The text of the value at the current place. An object that was passed to ``_give`` returns only ``{``."""
        scanner, value = ValueScanner(), ""
        while True:
            start, self._place = self._place, scanner.push(self._piece, self._place)
            piece = self._piece[start : self._place]
            if gives_object and (value or piece)[0] == "{":
                self._give(piece)
                value = "{"
            else:
                value += piece
            if scanner.done:
                return value
            yield

    def _give(self, text: str) -> None:
        self._arguments += text
        self._given = True


def _loaded_string(text: str) -> str | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, str) and found else None


class JSONCallsParser(MarkedCallsParser):
    """Parses calls as JSON objects. Subclasses define ``_call``, the state before an object, and ``_behind``."""

    _scanner: CallScanner | None = None
    _opened = False
    _behind: Callable[[], bool]

    @staticmethod
    def objects(names: Sequence[str], key: str = "arguments") -> str:
        """Lark of the rule ``object``: a function with its arguments, with the white space of chat templates."""
        heads = [f'{{"name": {json.dumps(name)}, "{key}": ' for name in names]
        each = [f'{json.dumps(head, ensure_ascii=False)} args_{i} "}}"' for i, head in enumerate(heads)]
        return "object: " + " | ".join(each)

    def _begin_object(self) -> bool:
        self._scanner, self._opened = CallScanner(), False
        self._state = self._object
        return True

    def _object(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._buffer = self._buffer[scanner.push(self._buffer) :]
        if scanner.name is not None and not self._opened and self._accepts(scanner.name):
            self._open_call(scanner.name)
            self._opened = True
        if self._opened:
            self._add_arguments(scanner.take_arguments())
            if scanner.done or scanner.failed:
                self.over = self._one_call
                self._scanner, self._state = None, self._behind
        elif scanner.done or scanner.failed or scanner.name is not None:
            self._give_up()
        return True

    def _accepts(self, name: str) -> bool:
        """Whether an object with this name is a call."""
        return True

    def _give_up(self) -> None:
        """Add the scanned text to the content, because it is not a call."""
        assert self._scanner is not None
        self._add_content(self.marker + self._scanner.text)
        self._scanner, self._state = None, self._text

    def _end(self) -> None:
        super()._end()
        if self._scanner is not None and not self._opened:
            self._give_up()

"""JSONCallsParser: what the families share that write calls as JSON objects; and the scanners that read these."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence

import orjson

from raylm.frontend.answers.tool_parsers.base import MarkedCallsParser

_ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of one JSON value; what is within it is not checked, only brackets and strings are followed."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def push(self, text: str, start: int = 0) -> int:
        """Read ``text`` from ``start`` on, the value's first character at first.

        Returns where the value ends, or the text's length if it goes on.
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
    """Reads one object {"name": …, "arguments": {…}} as it comes; other keys are passed over."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the function, once it is known
        self.done = False  # the object is closed
        self.failed = False  # this is no such object
        self._read: list[str] = []
        self._piece, self._place = "", 0
        self._arguments = ""
        self._given = False
        self._steps = self._object()

    def push(self, text: str) -> int:
        """Read on; returns how much of ``text`` belongs to the object."""
        self._piece, self._place = text, 0
        next(self._steps, None)
        self._read.append(text[: self._place])
        return self._place

    @property
    def text(self) -> str:
        """All that was read of the object, as it was written."""
        return "".join(self._read)

    def take_arguments(self) -> str:
        """The arguments' text since the last call of this; an object without any has ``{}``."""
        if self.done and not self._given:
            self._give("{}")
        taken, self._arguments = self._arguments, ""
        return taken

    def _object(self) -> Generator[None, None, None]:
        """The whole object; this and what it calls stop where they need the next piece."""
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
            self._give("{}" if value == "null" else _loaded_string(value) or value)  # some write it as a string

    def _peek(self) -> Generator[None, None, str]:
        """The next character that is no white space."""
        while True:
            while self._place < len(self._piece):
                if not self._piece[self._place].isspace():
                    return self._piece[self._place]
                self._place += 1
            yield

    def _value(self, *, gives_object: bool = False) -> Generator[None, None, str]:
        """The text of the value that begins here; of an object that was given out as it came only ``{``."""
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
    """Members say what stands before and behind an object: ``_call`` begins one, ``_behind`` follows it."""

    _scanner: CallScanner | None = None
    _opened = False
    _behind: Callable[[], bool]

    @staticmethod
    def objects(names: Sequence[str], key: str = "arguments") -> str:
        """Lark of the rule ``object``: one of the functions with its arguments, spaced as templates space JSON."""
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
        """Whether an object with this name is a call at all."""
        return True

    def _give_up(self) -> None:
        """This was no call: what was read is content."""
        assert self._scanner is not None
        self._add_content(self.marker + self._scanner.text)
        self._scanner, self._state = None, self._text

    def _end(self) -> None:
        super()._end()
        if self._scanner is not None and not self._opened:
            self._give_up()

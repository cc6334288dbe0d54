"""ValueScanner and CallScanner: find out where JSON values end while their text comes, without waiting for the end."""

from __future__ import annotations

from collections.abc import Callable

import orjson


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
        """Read ``text`` from ``start`` on; returns where the value ends, or the text's length if it goes on.

        The first character that is read must be the value's first one.
        """
        for place in range(start, len(text)):
            char = text[place]
            if self._in_string:
                self._follow_string(char)
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

    def _follow_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class CallScanner:
    """Reads one object {"name": …, "arguments": {…}} as it comes; other keys are passed over.

    Attributes:
        name: the function's, once it is known.
        done: the object is closed.
        failed: this is no such object.
    """

    def __init__(self, argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._pieces: list[str] = []
        self._argument_keys = argument_keys
        self._state: Callable[[str, int], int] = self._open
        self._key = ""
        self._value = ""
        self._scanner = ValueScanner()
        self._arguments = ""
        self._given = False

    def push(self, text: str) -> int:
        """Read on; returns how much of ``text`` belongs to the object."""
        place = 0
        while place < len(text) and not (self.done or self.failed):
            if text[place].isspace() and self._state != self._read:
                place += 1
            else:
                place = self._state(text, place)
        self._pieces.append(text[:place])
        return place

    @property
    def text(self) -> str:
        """All that was read of the object, as it was written."""
        return "".join(self._pieces)

    def take_arguments(self) -> str:
        """The text of the arguments that has come since the last call; an object without any has ``{}``."""
        if self.done and not self._given:
            self._give("{}")
        taken, self._arguments = self._arguments, ""
        return taken

    def _open(self, text: str, place: int) -> int:
        self.failed = text[place] != "{"
        self._state = self._before_key
        return place + (not self.failed)

    def _before_key(self, text: str, place: int) -> int:
        char = text[place]
        self.done = char == "}"
        self.failed = char not in '},"'
        if char == '"':
            self._begin_value("")
            return place
        return place + (not self.failed)

    def _colon(self, text: str, place: int) -> int:
        self.failed = text[place] != ":"
        self._state = self._begin
        return place + 1

    def _begin(self, text: str, place: int) -> int:
        self._begin_value(self._key)
        return place

    def _begin_value(self, key: str) -> None:
        """Read a value, that of ``key``, or with no key the next key itself."""
        self._key, self._value, self._scanner = key, "", ValueScanner()
        self._state = self._read

    def _read(self, text: str, place: int) -> int:
        end = self._scanner.push(text, place)
        piece = text[place:end]
        if self._key in self._argument_keys and (self._value or piece)[0] == "{":
            self._give(piece)
            self._value = "{"
        else:
            self._value += piece
        if self._scanner.done:
            self._finish()
        return end

    def _finish(self) -> None:
        """A key or a value is complete."""
        if not self._key:
            self._key = _loaded_string(self._value) or " "
            self._state = self._colon
            return
        self._state = self._before_key
        if self._key == "name":
            self.name = _loaded_string(self._value)
            self.failed = self.name is None
        elif self._key in self._argument_keys and self._value != "{":
            self._give(_as_object(self._value))
        self._key = ""

    def _give(self, text: str) -> None:
        self._arguments += text
        self._given = True


def _loaded_string(text: str) -> str | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, str) and found else None


def _as_object(text: str) -> str:
    """Arguments that are no object: null for none, or an object written once more as a string."""
    if text == "null":
        return "{}"
    return _loaded_string(text) or text

"""Calls after [TOOL_CALLS]: a list of objects, or, in newer Mistral models, the name and then the arguments."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence

from raylm.frontend.answers.tool_calls import Mark
from raylm.frontend.answers.tool_parsers.json_calls import JSONCallsParser, ValueScanner

_ALPHANUMERIC = string.ascii_letters + string.digits
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralParser(JSONCallsParser):
    """Parses ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` and repeated ``[TOOL_CALLS]name[ARGS]{…}``."""

    marker = "[TOOL_CALLS]"
    keeps_special_tokens = True

    _value: ValueScanner  # scanner for arguments of the newer format
    _opening = ""  # of a list whose first object is being read

    @classmethod
    def serves(cls, template: str) -> bool:
        return cls.marker in template

    @classmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        """The newer format if the vocabulary has its marker, else a list of one object for each call."""
        args = mark(_ARGS)
        if args.startswith('"'):
            return f'{mark(cls.marker)} "[" object "]"', "", cls.objects(names)
        each = [f"{json.dumps(name, ensure_ascii=False)} {args} args_{i}" for i, name in enumerate(names)]
        return f"{mark(cls.marker)} named", "", "named: " + " | ".join(each)

    def _new_id(self) -> str:
        """Mistral's templates accept only ids of nine letters and digits."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def _call(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "{":  # one object in place of a list
            self._behind = self._text
            return self._begin_object()
        if self._buffer[0] == "[":
            return self._first()
        self._state = self._name
        return True

    def _first(self) -> bool:
        """Read the beginning of a list. Without an object it is content."""
        begun = self._buffer[1:].lstrip()
        if not begun:
            return False
        self._behind = self._list
        if begun[0] == "{":
            self._opening, self._buffer = self._buffer[: len(self._buffer) - len(begun)], begun
            return self._begin_object()
        self._add_content(self.marker)
        self._state = self._text
        return True

    def _give_up(self) -> None:
        assert self._scanner is not None
        if self._opening:
            self._add_content(self.marker + self._opening + self._scanner.text)
            self._scanner, self._state = None, self._text
        else:
            super()._give_up()

    def _list(self) -> bool:
        """State: in a list, between or after objects."""
        self._opening = ""
        self._buffer = self._buffer.lstrip(" \t\r\n,")
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            return self._begin_object()
        self._buffer = self._buffer.removeprefix("]")
        self._state = self._text
        return True

    def _name(self) -> bool:
        """State: a name, with an optional id and marker, before the arguments."""
        at = self._buffer.find("{")
        if at < 0:
            return False
        name = self._buffer[:at].strip().removesuffix(_ARGS).partition(_CALL_ID)[0].strip()
        self._buffer = self._buffer[at:]
        self._open_call(name)
        self._value = ValueScanner()
        self._state = self._arguments
        return True

    def _end(self) -> None:
        super()._end()
        if self._state == self._name:
            self._add_content(self.marker)

    def _arguments(self) -> bool:
        end = self._value.push(self._buffer)
        self._add_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if self._value.done:
            self.over = self._one_call
            self._state = self._text
        return bool(self._buffer)

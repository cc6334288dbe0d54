"""JSONCallsParser: what the families share that write calls as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from raylm.frontend.answers.tool_calls import Tools
from raylm.frontend.answers.tool_parsers.base import MarkedCallsParser
from raylm.frontend.answers.tool_parsers.json_scanner import CallScanner


class JSONCallsParser(MarkedCallsParser):
    """Members say what stands before and behind an object: ``_call`` begins one, ``_behind`` follows it."""

    def __init__(self, tools: Tools, *, one_call: bool = False) -> None:
        super().__init__(tools, one_call=one_call)
        self._scanner: CallScanner | None = None
        self._opened = False
        self._behind: Callable[[], bool] = self._text

    @staticmethod
    def objects(names: Sequence[str], key: str = "arguments") -> str:
        """Lark of the rule ``object``: one of the functions with its arguments, spaced as templates space JSON."""
        heads = [f'{{"name": {json.dumps(name)}, "{key}": ' for name in names]
        each = [f'{json.dumps(head, ensure_ascii=False)} args_{i} "}}"' for i, head in enumerate(heads)]
        return "object: " + " | ".join(each)

    def _begin_object(self) -> bool:
        """Read an object from the front of the buffer."""
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
                self._close_call()
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

"""Calls as <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen2.5, Qwen3, and the embedded model."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.frontend.answers.tool_calls import Mark
from raylm.frontend.answers.tool_parsers.json_calls import JSONCallsParser

END = "</tool_call>"


class HermesParser(JSONCallsParser):
    """Parses calls that are one JSON object between two markers."""

    marker = "<tool_call>"

    @classmethod
    def serves(cls, template: str) -> bool:
        return cls.marker in template

    @classmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        return f'{mark(cls.marker)} "\\n" object "\\n" {mark(END)}', '"\\n"', cls.objects(names)

    def _call(self) -> bool:
        self._behind = self._closing
        return self._skip_space() and self._begin_object()

    def _closing(self) -> bool:
        """State: the end marker, which some models omit."""
        if not self._skip_space() or (END.startswith(self._buffer) and self._buffer != END):
            return False
        self._buffer = self._buffer.removeprefix(END)
        self._state = self._text
        return True

    def _end(self) -> None:
        super()._end()
        if self._state == self._closing and END.startswith(self._buffer):
            self._buffer = ""

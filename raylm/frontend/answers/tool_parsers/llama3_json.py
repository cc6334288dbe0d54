"""Calls as {"name": …, "parameters": {…}} without a marker: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.frontend.answers.tool_calls import Mark
from raylm.frontend.answers.tool_parsers.json_calls import JSONCallsParser

_PYTHON_TAG = "<|python_tag|>"
_SPACE = " \t\r\n"


class Llama3JSONParser(JSONCallsParser):
    """Parses an answer that begins with an object with a known function's name. More calls may follow after ``;``.

    An object without such a name is an ordinary JSON answer, and becomes content.
    """

    marker = ""
    keeps_special_tokens = True  # <|python_tag|> may come before a call

    @classmethod
    def serves(cls, template: str) -> bool:
        return '"parameters": ' in template and ("python_tag" in template or "ipython" in template)

    @classmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        return "object", '"; "', cls.objects(names, "parameters")

    @classmethod
    def free_text(cls) -> str:
        return "calls | /[^{](.|\\n)*/"

    def _text(self) -> bool:
        """State: the beginning of the answer, or the text after a call. Next is an object, or content until the end."""
        begun = self._buffer.lstrip(_SPACE + ";" if self.has_calls else _SPACE)
        begun = begun.removeprefix(_PYTHON_TAG).lstrip()
        if _PYTHON_TAG.startswith(begun):
            return False
        if begun[0] == "{":
            self._buffer = begun
            return self._call()
        self._state = self._rest
        return True

    def _call(self) -> bool:
        self._behind = self._text
        return self._begin_object()

    def _accepts(self, name: str) -> bool:
        return name in self._tools

    def _give_up(self) -> None:
        super()._give_up()
        self._state = self._rest

    def _end(self) -> None:
        super()._end()
        if self.has_calls and self._state == self._text and not self._buffer.strip(_SPACE + ";"):
            self._buffer = ""

    def _rest(self) -> bool:
        """State: content until the end."""
        self._add_content(self._buffer)
        self._buffer = ""
        return False

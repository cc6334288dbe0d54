"""MarkedCallsParser: what the parsers share that look for a marker, behind which a call stands."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable

from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.answers.tool_calls import Parsed, ToolParser, Tools
from raylm.frontend.answers.tool_parsers.forms import ToolForms
from raylm.frontend.outputs import ToolCallDelta
from raylm.frontend.text.stop_strings import MarkerSearch
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.types import ChatRequest
from raylm.params import SamplingParams, StructuredOutputs


class MarkedCallsParser(ToolParser):
    """A machine of states: each takes what it can from the front of ``_buffer``, or returns False to wait for more.

    Text outside calls is content, but for white
    space before, between and after calls. What looks like a call at first and turns out not to be one before its name
    is known becomes content, as it was written.
    """

    def __init__(self, tools: Tools, *, one_call: bool = False) -> None:
        self.over = self.has_calls = False
        self._one_call = one_call
        self._num_opened = 0
        self._tools = tools
        self._search = MarkerSearch(self.marker) if self.marker else None
        self._buffer = ""
        self._state: Callable[[], bool] = self._text
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @classmethod
    async def form_of(
        cls, request: ChatRequest, params: SamplingParams, tokenizer: Tokenizer, compiler: GrammarCompiler
    ) -> StructuredOutputs | None:
        return await ToolForms(cls, request, tokenizer, compiler).form(params)

    @abstractmethod
    def _call(self) -> bool:
        """The state behind the marker."""

    def push(self, text: str) -> Parsed:
        self._buffer += text
        while self._buffer and not self.over and self._state():
            pass
        return self._parsed()

    def flush(self) -> Parsed:
        if self.over:
            return "", []
        self._end()
        self._add_content(self._buffer)
        self._buffer = ""
        return self._parsed()

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _end(self) -> None:
        """Let go of what the current state holds beside the buffer."""
        if self._state == self._call:
            self._add_content(self.marker)
        elif self._search is not None:
            self._add_content(self._search.flush())

    def _parsed(self) -> Parsed:
        parsed = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return parsed

    def _text(self) -> bool:
        """Content, up to the marker."""
        assert self._search is not None
        content, rest = self._search.push(self._buffer)
        self._add_content(content)
        self._buffer = rest or ""
        if rest is not None:
            self._state = self._call
        return rest is not None

    def _add_content(self, text: str) -> None:
        if not self.has_calls or text.strip():
            self._content.append(text)

    def _skip_space(self) -> bool:
        """Drop white space at the front; whether there is something behind it."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _open_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_opened, self._new_id(), name))
        self._num_opened += 1
        self.has_calls = True

    def _add_arguments(self, text: str) -> None:
        """More of the arguments of the call opened last."""
        if text and not self._deltas:
            self._deltas.append(ToolCallDelta(self._num_opened - 1))
        if text:
            self._deltas[-1].arguments += text

    def _close_call(self) -> None:
        self.over = self._one_call

"""ToolParser: finds the tool calls in the text of one sequence, as the text comes, and says how a model writes them."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from raylm.frontend.outputs import ToolCallDelta
from raylm.frontend.text.markers import settled

Tools = Mapping[str, Mapping[str, Any]]
Mark = Callable[[str], str]
Parsed = tuple[str, list[ToolCallDelta]]

_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolParser(ABC):
    """A machine of states, each a method that takes what it can from the front of ``_buffer``.

    Text outside calls is content, but for white space before, between and after calls. What looks like a call at first
    and turns out not to be one before its name is known becomes content, as it was written.

    Args:
        tools: the parameters' schema of each function by its name.
        one_call: whether the text is over with the first call.
    """

    marker: ClassVar[str]
    """What calls begin with."""
    keeps_special_tokens: ClassVar[bool] = False
    """Whether markers are special tokens, which a text shows only if it is asked to."""

    def __init__(self, tools: Tools, *, one_call: bool = False) -> None:
        self.over = False
        self._one_call = one_call
        self._num_opened = 0
        self._tools = tools
        self._buffer = ""
        self._state: Callable[[], bool] = self._text
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @classmethod
    @abstractmethod
    def serves(cls, template: str) -> bool:
        """Whether a chat template writes calls in this parser's form."""

    @abstractmethod
    def _call(self) -> bool:
        """The state behind the marker; whether it took anything or went to another state."""

    @classmethod
    @abstractmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        """How a model writes calls, in Lark: (one call, what stands between two, further rules).

        The arguments of the function ``names[i]`` are the rule ``args_i``; ``mark`` gives a marker's own expression.
        """

    @classmethod
    def free_text(cls) -> str:
        """Lark for an answer in which calls may stand, but must be right: of the rules TEXT and calls."""
        return "TEXT? (calls TEXT?)*"

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_opened > 0

    def push(self, text: str) -> Parsed:
        """Take in the next piece; return what is final of (content, calls)."""
        self._buffer += text
        while self._buffer and not self.over and self._state():
            pass
        return self._parsed()

    def flush(self) -> Parsed:
        """What is held back, once no more text comes."""
        if self.over:
            return "", []
        self._end()
        self._say(self._buffer)
        self._buffer = ""
        return self._parsed()

    def new_id(self) -> str:
        """An id for the next call."""
        return f"call_{secrets.token_hex(12)}"

    def _end(self) -> None:
        """Let go of what the current state holds beside the buffer."""
        if self._state == self._call:
            self._say(self.marker)

    def _parsed(self) -> Parsed:
        content, self._content = "".join(self._content), []
        calls, self._deltas = self._deltas, []
        return content, calls

    def _text(self) -> bool:
        """Content, up to the marker."""
        at = self._buffer.find(self.marker)
        if at >= 0:
            self._say(self._buffer[:at].rstrip())
            self._buffer = self._buffer[at + len(self.marker) :]
            self._state = self._call
            return True
        count = settled(self._buffer, self.marker)
        self._say(self._buffer[:count])
        self._buffer = self._buffer[count:]
        return False

    def _say(self, text: str) -> None:
        if not self.has_calls or text.strip():
            self._content.append(text)

    def _skip_space(self) -> bool:
        """Drop white space at the front; whether there is something behind it."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _open_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_opened, self.new_id(), name))
        self._num_opened += 1

    def _add_arguments(self, text: str) -> None:
        """More of the arguments of the call opened last."""
        if not text:
            return
        if not self._deltas:
            self._deltas.append(ToolCallDelta(self._num_opened - 1))
        self._deltas[-1].arguments += text

    def _close_call(self) -> None:
        self.over = self._one_call


def short_id() -> str:
    """Nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

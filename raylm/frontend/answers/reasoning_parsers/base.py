"""ReasoningParser: tells the thoughts of one sequence from its answer, as the text comes."""

from __future__ import annotations

from typing import ClassVar

from raylm.frontend.text.markers import overlap, settled


class ReasoningParser:
    """Thoughts stand between two markers, each a single token, before the answer.

    A sequence thinks from its beginning if the prompt has opened the thoughts already (``thinking``), else if its own
    text begins with ``start``. White space around thoughts, and before an answer that follows some, belongs to neither.
    """

    start: ClassVar[str]
    end: ClassVar[str]
    closing: ClassVar[str]
    """What the model is made to write when its budget for thoughts is used up; holds ``end``."""

    def __init__(self, *, thinking: bool) -> None:
        self._buffer = ""
        self._beginning = not thinking
        self._thinking = thinking
        self._fresh = thinking  # nothing but white space has come since the last marker

    @classmethod
    def serves(cls, template: str) -> bool:
        """Whether a chat template speaks of these markers."""
        return cls.end in template

    def push(self, text: str) -> tuple[str, str]:
        """Take in the next piece; return what is final of (thoughts, answer)."""
        self._buffer += text
        if self._beginning and not self._decide():
            return "", ""
        if not self._thinking:
            return "", self._take(len(self._buffer))
        at = self._buffer.find(self.end)
        if at < 0:
            return self._take(settled(self._buffer, self.end)), ""
        thoughts = self._take(at).rstrip()
        self._buffer = self._buffer[len(self.end) :]
        self._thinking, self._fresh = False, True
        return thoughts, self._take(len(self._buffer))

    def flush(self) -> tuple[str, str]:
        """What is held back, once no more text comes."""
        held = self._take(len(self._buffer))
        return (held, "") if self._thinking else ("", held)

    def _decide(self) -> bool:
        """Whether the text is long enough to say that it begins with thoughts, or does not."""
        begun = self._buffer.lstrip()
        if begun.startswith(self.start):
            self._buffer = begun[len(self.start) :]
            self._thinking = self._fresh = True
        elif overlap(begun, self.start) == len(begun):
            return False
        self._beginning = False
        return True

    def _take(self, count: int) -> str:
        """The first ``count`` characters of the buffer, without white space after a marker."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._fresh:
            taken = taken.lstrip()
            self._fresh = not taken
        return taken

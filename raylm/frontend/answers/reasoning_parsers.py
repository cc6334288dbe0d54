"""Reasoning parsers: separate the reasoning of one sequence from its answer, while the text arrives."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.frontend.text.stop_strings import MarkerSearch
from raylm.messages import ReasoningTokenIds


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after reasoning. Each is a single token.

    ``closing`` is the text that the model is forced to write when its thinking budget is used up. It contains ``end``.
    """

    start: str
    end: str
    closing: str


REASONING_PARSERS = {
    # DeepSeek-R1 and its distillates, Qwen3, QwQ, and the embedded model
    "think": ReasoningMarkers("<think>", "</think>", "\n</think>\n\n"),
    # Mistral's reasoning models (Magistral), whose markers are special tokens
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]", "[/THINK]"),
    # ByteDance's Seed-OSS
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>", "</seed:think>"),
}


def detect_reasoning_parser(template: str) -> str | None:
    """The name of the first parser whose end marker is in a chat template."""
    return next((name for name, markers in REASONING_PARSERS.items() if markers.end in template), None)


class ReasoningParser:
    """Separates reasoning, which is between two markers before the answer, from the answer.

    A sequence begins with reasoning if the prompt ends in an open marker (``thinking``), or if its own text begins with
    the start marker. White space around reasoning, and before an answer after reasoning, is dropped.
    """

    def __init__(self, markers: ReasoningMarkers, *, thinking: bool) -> None:
        self._beginning = "" if not thinking else None  # text that may still become the start marker
        self._thinking = thinking
        self._fresh = thinking  # only white space has arrived since the last marker
        self._start = markers.start
        self._search = MarkerSearch(markers.end)

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that are not yet assigned."""
        return self._search.num_held if self._thinking else len(self._beginning or "")

    def push(self, text: str) -> tuple[str, str]:
        """Add the next piece of text. Returns the final (reasoning, answer)."""
        if self._beginning is not None:
            self._beginning += text
            begun = self._beginning.lstrip()
            if self._start.startswith(begun) and begun != self._start:
                return "", ""
            self._thinking = self._fresh = begun.startswith(self._start)
            text, self._beginning = begun[len(self._start) :] if self._thinking else self._beginning, None
        if not self._thinking:
            return "", self._without_first_space(text)
        reasoning, answer = self._search.push(text)
        reasoning = self._without_first_space(reasoning)
        if answer is None:
            return reasoning, ""
        self._thinking, self._fresh = False, True
        return reasoning, self._without_first_space(answer)

    def flush(self) -> tuple[str, str]:
        if self._thinking:
            return self._without_first_space(self._search.flush()), ""
        held, self._beginning = self._beginning or "", None
        return "", held

    def _without_first_space(self, text: str) -> str:
        """``text`` without white space after a marker."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


class ReasoningTokenCounter:
    """Counts the reasoning tokens of one sequence, which come before all its other tokens."""

    __slots__ = ("_beginning", "_num_blank", "_thinking", "_tokens")

    def __init__(self, tokens: ReasoningTokenIds) -> None:
        self._tokens = tokens
        self._thinking = tokens.begun
        self._beginning = not tokens.begun
        self._num_blank = 0  # tokens of white space at the beginning, which may come before the start marker

    def count(self, token_ids: list[int], *, blank: bool = False) -> tuple[int, int]:
        """The number of reasoning tokens among the next tokens, without the markers and with all tokens before.

        ``blank``: the next tokens have no text but white space so far. The tokens before a start marker are counted
        with it.
        """
        opening = 0
        rest = token_ids
        if self._beginning and token_ids:
            is_start = token_ids[0] == self._tokens.start_token_id
            if blank and not is_start:
                self._num_blank += len(token_ids)
                return 0, 0
            self._beginning, self._thinking = False, is_start
            if is_start:
                opening, rest = self._num_blank + 1, token_ids[1:]
        if not self._thinking:
            return 0, 0
        if self._tokens.end_token_id not in rest:
            return len(rest), opening + len(rest)
        self._thinking = False
        num_reasoning = rest.index(self._tokens.end_token_id)
        return num_reasoning, opening + num_reasoning + 1

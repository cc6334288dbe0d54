"""AnswerFormat: how the answers to one request are read, and AnswerReader, which reads one of them as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.frontend.answers.reasoning_parsers import ReasoningMarkers, ReasoningParser, ReasoningTokenCounter
from raylm.frontend.answers.tool_calls import ToolParser, Tools
from raylm.frontend.outputs import CompletionDelta, join_calls
from raylm.messages import Thinking


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What there is to find in the texts of one request: reasoning, tool calls, or both.

    ``reasoning`` and ``thinking`` are None together. With ``one_call`` a sequence ends with its first call.
    """

    reasoning: ReasoningMarkers | None = None
    thinking: Thinking | None = None
    tool_parser: type[ToolParser] | None = None
    tools: Tools | None = None
    one_call: bool = False


class AnswerReader:
    """Sorts the text of one sequence; what stands in its deltas' ``text`` is then the answer alone."""

    __slots__ = ("_reasoning", "_tokens", "_tools")

    def __init__(self, form: AnswerFormat) -> None:
        self._reasoning = self._tokens = self._tools = None
        if form.reasoning is not None and form.thinking is not None:
            self._reasoning = ReasoningParser(form.reasoning, thinking=form.thinking.begun)
            self._tokens = ReasoningTokenCounter(form.thinking)
        if form.tool_parser is not None:
            self._tools = form.tool_parser(form.tools or {}, one_call=form.one_call)

    def read(self, delta: CompletionDelta) -> None:
        """Sort what is new, in place; ``finish_reason`` may be set where there was none: then the sequence is over."""
        ended = delta.finish_reason is not None
        if self._reasoning is not None and self._tokens is not None:
            delta.reasoning_tokens = self._tokens.count(delta.token_ids)
            delta.reasoning, delta.text = self._reasoning.push(delta.text)
            if ended:
                reasoning, text = self._reasoning.flush()
                delta.reasoning, delta.text = delta.reasoning + reasoning, delta.text + text
        if self._tools is not None:
            delta.text, delta.tool_calls = self._tools.push(delta.text)
            if ended:
                rest, more = self._tools.flush()
                delta.text, delta.tool_calls = delta.text + rest, join_calls(delta.tool_calls, more)
            delta.tool_calls = delta.tool_calls or None
            if self._tools.over or (self._tools.has_calls and delta.finish_reason == "stop"):
                delta.finish_reason = "tool_calls"
            if self._tools.over:
                delta.stop_reason = None  # what stopped the text came behind the call

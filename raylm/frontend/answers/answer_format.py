"""AnswerFormat: how the answers to one request are read, and AnswerReader, which reads one of them as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.frontend.answers.reasoning_parsers import ReasoningMarkers, ReasoningParser, ReasoningTokenCounter
from raylm.frontend.answers.tool_calls import ToolParser, Tools
from raylm.frontend.outputs import CompletionDelta, TokenLogprob
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

    __slots__ = ("_reasoning", "_text_tokens", "_tokens", "_tools")

    def __init__(self, form: AnswerFormat) -> None:
        self._reasoning = self._tokens = self._tools = None
        if form.reasoning is not None and form.thinking is not None:
            self._reasoning = ReasoningParser(form.reasoning, thinking=form.thinking.begun)
            self._tokens = ReasoningTokenCounter(form.thinking)
        if form.tool_parser is not None:
            self._tools = form.tool_parser(form.tools or {}, one_call=form.one_call)
        self._text_tokens = TextTokens()

    def read(self, delta: CompletionDelta) -> list[CompletionDelta]:
        """Sort what is new; returns ``delta``, with others behind it only where text follows a call.

        The last one's ``finish_reason`` may be set where ``delta`` had none: then the sequence is over. Tokens are told
        apart exactly where ``delta`` has one at most; of several the text counts as that of the last.
        """
        said, ended = delta.text, delta.finish_reason is not None
        if self._reasoning is not None and self._tokens is not None:
            delta.reasoning_tokens = self._tokens.count(delta.token_ids)
            delta.reasoning, delta.text = self._reasoning.push(delta.text)
            if ended:
                reasoning, text = self._reasoning.flush()
                delta.reasoning, delta.text = delta.reasoning + reasoning, delta.text + text
        found = [delta] if self._tools is None else self._find_calls(self._tools, delta, ended)
        if delta.logprobs is not None:
            self._text_tokens.add(delta.logprobs, said)
            num_held = sum(parser.num_held for parser in (self._reasoning, self._tools) if parser is not None)
            for part in found:
                part.text_logprobs = self._text_tokens.take(part.text, num_held)
                if not part.text and (part.reasoning or part.tool_calls):
                    self._text_tokens.drop()
        return found

    @staticmethod
    def _find_calls(tools: ToolParser, delta: CompletionDelta, ended: bool) -> list[CompletionDelta]:
        parsed = tools.push(delta.text)
        if ended:
            parsed += tools.flush()
        delta.text, found = "", [delta]
        for text, calls in parsed:
            later = CompletionDelta(delta.index, text, tool_calls=calls or None, told=delta.told)
            later.finish_reason, later.stop_reason = found[-1].finish_reason, found[-1].stop_reason
            if found[-1].takes(later):
                found[-1].add(later)
            else:
                found[-1].finish_reason = found[-1].stop_reason = None
                found.append(later)
        last = found[-1]
        if tools.over or (tools.has_calls and last.finish_reason == "stop"):
            last.finish_reason = "tool_calls"
        if tools.over:
            last.stop_reason = None  # what stopped the text came behind the call
        return found


class TextTokens:
    """Finds the tokens that the text of an answer is made of, while what they said is sorted.

    A token belongs to the text if a character of it does, or, where it ends within a character, if that character
    does. Markers, white space that parsers drop, and the token that ends the answer belong to no text.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[TokenLogprob, str]] = []  # tokens whose text is not sorted yet, with that text

    def add(self, entries: list[TokenLogprob], said: str) -> None:
        """The next tokens, and what they said together."""
        last = len(entries) - 1
        self._waiting += [(entry, said if place == last else "") for place, entry in enumerate(entries)]

    def drop(self) -> None:
        """All that waits was reasoning or a call."""
        self._waiting.clear()

    def take(self, text: str, num_held: int) -> list[TokenLogprob]:
        """The tokens of ``text``, behind which so many characters are held back."""
        if not text:
            return []
        whole = "".join(said for _, said in self._waiting)
        end = len(whole) - num_held
        if not whole.endswith(text, 0, end):  # something behind it was dropped already
            end = whole.rfind(text) + len(text) if text in whole else len(whole)
        found, later, begin, at = [], [], end - len(text), 0
        for entry, said in self._waiting:
            start, at = at, at + len(said)
            if start >= end:
                later.append((entry, said))
            elif at > begin or (start == begin and not said):
                found.append(entry)
        self._waiting = later
        return found

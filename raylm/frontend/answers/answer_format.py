"""AnswerFormat, the parsers for the answers of one request, and AnswerReader, which applies them to one answer."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.frontend.answers.reasoning_parsers import ReasoningMarkers, ReasoningParser, ReasoningTokenCounter
from raylm.frontend.answers.tool_calls import ToolParser, Tools
from raylm.frontend.outputs import CompletionDelta, TokenLogprob, TokenLogprobs
from raylm.messages import ReasoningTokenIds


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the texts of one request are parsed: for reasoning, tool calls, or both.

    ``reasoning`` and ``thinking`` are None together. With ``one_call`` a sequence ends after its first call.
    """

    reasoning: ReasoningMarkers | None = None
    thinking: ReasoningTokenIds | None = None
    tool_parser: type[ToolParser] | None = None
    tools: Tools | None = None
    one_call: bool = False


class AnswerReader:
    """Parses the text of one sequence. After ``read``, the ``text`` of a delta has only the answer."""

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
        """Parse a delta. Returns ``delta``, followed by further deltas only if text follows a call.

        The last delta's ``finish_reason`` may be set although ``delta`` had none: then the sequence has ended. Tokens
        are assigned to parts of the answer exactly if ``delta`` has at most one token. If it has several, all its text
        is assigned to the last token.
        """
        said, ended = delta.text, delta.finish_reason is not None
        if self._reasoning is not None and self._tokens is not None:
            delta.reasoning_tokens, delta.tokens_before_answer = self._tokens.count(
                delta.token_ids, blank=not said.strip()
            )
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
                if part is found[-1] and not part.text and (part.reasoning or part.tool_calls):
                    self._text_tokens.drop(num_held)
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
            last.stop_reason = None  # the stop string or token came after the call
        return found


class TextTokens:
    """Finds the tokens of an answer's text in the stream of all tokens.

    A token belongs to the text if one of its characters does. A token that ends within a character belongs to the text
    if that character does. Markers, white space that parsers drop, and the end token do not belong to the text.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[TokenLogprob, str]] = []  # (token, its text) of tokens not yet assigned

    def add(self, entries: TokenLogprobs, said: str) -> None:
        """Add the next tokens, and their joint text ``said``."""
        last = len(entries) - 1
        self._waiting += [(entry, said if place == last else "") for place, entry in enumerate(entries)]

    def drop(self, num_held: int) -> None:
        """Drop the tokens before the last ``num_held`` characters: they were reasoning or part of a call."""
        num_chars = num_kept = 0
        for _, said in reversed(self._waiting):
            if num_chars >= num_held:
                break
            num_chars, num_kept = num_chars + len(said), num_kept + 1
        del self._waiting[: len(self._waiting) - num_kept]

    def take(self, text: str, num_held: int) -> TokenLogprobs:
        """Return the tokens of ``text``. ``num_held`` characters after ``text`` are held back by parsers."""
        found = TokenLogprobs()
        if not text:
            return found
        whole = "".join(said for _, said in self._waiting)
        end = max(len(whole) - num_held, 0)
        begun_before = text.endswith(whole[:end])  # the text begins in a token that was taken with the text before
        if not whole.endswith(text, 0, end) and not begun_before:  # text after it was dropped already
            end = whole.rfind(text) + len(text) if text in whole else len(whole)
        later, begin, at = [], end - len(text), 0
        for entry, said in self._waiting:
            start, at = at, at + len(said)
            if start >= end:
                later.append((entry, said))
            elif at > begin or (start == begin and not said):
                found.append(entry)
        self._waiting = later
        return found

"""MarkedCallsParser, a parser for calls after a marker, and ToolForms, the form of calls in Lark."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.answers.tool_calls import Parsed, ToolParser, Tools
from raylm.frontend.outputs import ToolCallDelta
from raylm.frontend.text.chat_template import ChatRequest, RequiredTool
from raylm.frontend.text.stop_strings import MarkerSearch
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.params import LARK, SamplingParams, StructuredOutputs

MOST_CALLS = 16
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False}


class MarkedCallsParser(ToolParser):
    """A state machine. A state is a method that consumes text from ``_buffer``, or returns False to wait for more text.

    Text outside calls is content, except white space before, between and after calls. Text that begins like a call, but
    fails before its name is complete, becomes content unchanged.
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
        self._parsed: Parsed = []

    @property
    def num_held(self) -> int:
        return len(self._buffer) + (self._search.num_held if self._search is not None else 0)

    @classmethod
    async def form_of(
        cls, request: ChatRequest, params: SamplingParams, tokenizer: Tokenizer, compiler: GrammarCompiler
    ) -> StructuredOutputs | None:
        return await ToolForms(cls, request, tokenizer, compiler).form(params)

    @abstractmethod
    def _call(self) -> bool:
        """The state after the marker."""

    def push(self, text: str) -> Parsed:
        self._buffer += text
        while self._buffer and not self.over and self._state():
            pass
        return self._take_parsed()

    def flush(self) -> Parsed:
        if self.over:
            return []
        self._end()
        self._add_content(self._buffer)
        self._buffer = ""
        return self._take_parsed()

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _end(self) -> None:
        """Move the text that the current state holds outside the buffer to the content."""
        if self._state == self._call:
            self._add_content(self.marker)
        elif self._search is not None:
            self._add_content(self._search.flush())

    def _take_parsed(self) -> Parsed:
        self._end_pair()
        parsed, self._parsed = self._parsed, []
        return parsed

    def _end_pair(self) -> None:
        """Close the current pair of content and calls. Later content is after these calls."""
        if self._content or self._deltas:
            self._parsed.append(("".join(self._content), self._deltas))
            self._content, self._deltas = [], []

    def _text(self) -> bool:
        """State: content up to the marker."""
        assert self._search is not None
        content, rest = self._search.push(self._buffer)
        self._add_content(content)
        self._buffer = rest or ""
        if rest is not None:
            self._state = self._call
        return rest is not None

    def _add_content(self, text: str) -> None:
        if text and (not self.has_calls or text.strip()):
            if self._deltas:
                self._end_pair()
            self._content.append(text)

    def _skip_space(self) -> bool:
        """Drop white space at the front. Returns whether text remains."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _open_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_opened, self._new_id(), name))
        self._num_opened += 1
        self.has_calls = True

    def _add_arguments(self, text: str) -> None:
        """Add ``text`` to the arguments of the last call."""
        if text and not self._deltas:
            self._deltas.append(ToolCallDelta(self._num_opened - 1))
        if text:
            self._deltas[-1].arguments += text


class ToolForms:
    """The forms of calls of one request's tools, in the parser's call format and the tokenizer's tokens."""

    def __init__(
        self, parser: type[ToolParser], request: ChatRequest, tokenizer: Tokenizer, compiler: GrammarCompiler
    ) -> None:
        self._parser = parser
        self._request = request
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._functions = [tool["function"] for tool in request.tools or ()]
        self._schemas: list[Mapping[str, Any]] = [function.get("parameters") or {} for function in self._functions]

    async def form(self, params: SamplingParams) -> StructuredOutputs | None:
        """The form that the answer must match; None for any text.

        A form is needed for required or named calls, for JSON answers beside calls, and for calls of ``strict`` tools
        in any text. Some parsers need it for all calls.

        Raises:
            UnsupportedFieldError: the model or the request's other fields do not allow the form.
            InvalidRequestError: a tool's schema cannot be compiled.
        """
        asked, choice = params.structured_outputs, self._request.tool_choice
        if isinstance(choice, RequiredTool):
            lark = self._grammar(only=choice.name)
        elif choice == "required":
            lark = self._grammar()
        elif asked is not None:
            lark = f"{self._grammar('calls | answer')}\nanswer: %json {_answer_schema(asked)}"
        elif self._parser.holds_calls:
            lark = self._grammar(self._held_calls())
        elif any(function.get("strict") for function in self._functions):
            marker = self._parser.marker
            if marker and self._mark(marker).startswith('"'):
                message = f"'strict' is not supported with tool_choice auto: {marker} is not a token of this model."
                raise UnsupportedFieldError(message, param="tools")
            lark = self._grammar(self._parser.free_text())
        else:
            return None
        form = StructuredOutputs(grammar=lark, param="tools")
        await self._check(form, asked)
        return form

    def _held_calls(self) -> str:
        """Lark of any text with calls. Uses the rule ``rest``, a call after its marker.

        A marker that is no token of the model ends a lexeme of text. After it only a call can follow.
        """
        if not self._mark(self._parser.marker).startswith('"'):
            return self._parser.free_text()
        marker, most = self._parser.marker, MOST_CALLS if self._request.parallel_tool_calls else 1
        head, tail = f"head[lazy]: /(.|\\n)*{marker}/", f"TAIL: /(.|\\n)+/ & ~/(.|\\n)*{marker}(.|\\n)*/"
        return f"(head rest){{0,{most}}} TAIL?\n{head}\n{tail}"

    def _grammar(self, start: str = "calls", *, only: str | None = None) -> str:
        """Lark of an answer with at most ``MOST_CALLS`` calls, or with one call of the function ``only``.

        ``start`` describes the answer with the rules ``calls`` and ``TEXT``. Arguments have the white space that chat
        templates use for JSON, because models write the format that they have read.
        """
        pairs = zip((function["name"] for function in self._functions), self._schemas, strict=True)
        named = [(name, schema) for name, schema in pairs if only in (None, name)]
        call, between, rules = self._parser.rules([name for name, _ in named], self._mark)
        parallel = self._request.parallel_tool_calls and only is None
        more = f"({between} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
        lines = [f"start: {start}", f"calls: call {more}", f"call: {call}", rules]
        spaced = ({"type": "object", "x-guidance": _SPACED, **schema} for _, schema in named)
        lines += [f"args_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(spaced)]
        return LARK + "\n".join([*lines, "TEXT: /(.|\\n)+/" if "TEXT" in start else ""])

    async def _check(self, form: StructuredOutputs, answer: StructuredOutputs | None) -> None:
        """Compile ``form``. On an error compile each part, so that the error names the wrong field."""
        try:
            await self._compiler.compile(form)
        except InvalidRequestError:
            if answer is not None:
                await self._compiler.compile(answer)
            for place, schema in enumerate(self._schemas):
                param = f"tools[{place}].function.parameters"
                await self._compiler.compile(StructuredOutputs(json={"type": "object", **schema}, param=param))
            raise

    def _mark(self, marker: str) -> str:
        """A marker in Lark: its token if the vocabulary has one, else its characters."""
        token_id = self._tokenizer.backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _answer_schema(asked: StructuredOutputs) -> str:
    if asked.json is None and not asked.json_object:
        raise UnsupportedFieldError(f"'{asked.param}' cannot be combined with tools; only JSON can.", param=asked.param)
    given = {"type": "object"} if asked.json is None else asked.json
    schema: Any = json.loads(given) if isinstance(given, str) else given
    return json.dumps({"x-guidance": _COMPACT, **schema} if isinstance(schema, dict) else schema)

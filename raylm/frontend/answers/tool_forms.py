"""ToolForms: what form an answer must have so that the calls which a request asks for are sure to be right."""

from __future__ import annotations

import json
from typing import Any

from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend.answers.chat_request import ChatRequest, NamedTool
from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.answers.tool_grammar import Functions, calls_grammar, calls_or_answer
from raylm.frontend.answers.tool_parsers import ToolParser
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.params import SamplingParams, StructuredOutputs

Tool = dict[str, Any]


class ToolForms:
    """Of the tools of one model: its parser's way of writing calls, in its tokenizer's tokens."""

    def __init__(self, parser: type[ToolParser], tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._compiler = compiler

    async def form_of(
        self, request: ChatRequest, tools: list[Tool], params: SamplingParams
    ) -> StructuredOutputs | None:
        """The form of the answer, None if it is free.

        Calls that are required or named are held to the form, and so is an answer in JSON in their place, or any text
        around calls of ``strict`` tools.

        Raises:
            InvalidRequestError: a tool's parameters are no schema that can be held to; ``param`` names the tool.
        """
        functions = _functions(tools)
        asked, parallel = params.structured_outputs, request.parallel_tool_calls
        if isinstance(request.tool_choice, NamedTool):
            named = [function for function in functions if function[0] == request.tool_choice.name]
            lark = calls_grammar(self._parser, named, self._mark, parallel=False)
        elif request.tool_choice == "required":
            lark = calls_grammar(self._parser, functions, self._mark, parallel=parallel)
        elif asked is not None:
            _check_combines(asked)
            lark = calls_or_answer(self._parser, functions, self._mark, parallel=parallel, answer=asked)
        elif any(tool["function"].get("strict") for tool in tools):
            self._check_marked()
            start = self._parser.free_text()
            lark = calls_grammar(self._parser, functions, self._mark, parallel=parallel, start=start)
        else:
            return None
        form = StructuredOutputs(grammar=lark, param="tools")
        await self._check(form, functions, asked)
        return form

    async def _check(self, form: StructuredOutputs, functions: Functions, answer: StructuredOutputs | None) -> None:
        """Compile it; what is wrong is sought in the parts, so that the error names the right one."""
        try:
            await self._compiler.compile(form)
        except InvalidRequestError:
            if answer is not None:
                await self._compiler.compile(answer)
            for place, (_, schema) in enumerate(functions):
                param = f"tools[{place}].function.parameters"
                await self._compiler.compile(StructuredOutputs(json={"type": "object", **schema}, param=param))
            raise

    def _mark(self, marker: str) -> str:
        """A marker in Lark: its token if it has one, else its characters."""
        token_id = self._tokenizer.backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    def _check_marked(self) -> None:
        marker = self._parser.marker
        if marker and self._mark(marker).startswith('"'):
            raise UnsupportedFieldError(
                f"'strict' is not supported with tool_choice auto: {marker} is no token of this model.", param="tools"
            )


def _functions(tools: list[Tool]) -> Functions:
    return [(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in tools]


def _check_combines(asked: StructuredOutputs) -> None:
    if asked.json is None and not asked.json_object:
        raise UnsupportedFieldError(f"'{asked.param}' cannot be combined with tools; only JSON can.", param=asked.param)

"""ChatProcessor: converts a conversation to a prompt, and chooses the parsers for its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raylm.config import Config
from raylm.errors import ConfigError, UnsupportedFieldError
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.answers.reasoning_parsers import REASONING_PARSERS, ReasoningMarkers, detect_reasoning_parser
from raylm.frontend.answers.tool_calls import TOOL_PARSERS, detect_tool_parser
from raylm.frontend.text.chat_template import ChatRequest, ChatTemplate
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.text.turn_tokens import TurnTokens
from raylm.frontend.timelines.record import mark
from raylm.messages import ReasoningTokenIds, TokenIds
from raylm.params import SamplingParams

_TAIL_TOKENS = 16  # tokens at the end of a prompt that are searched for markers of reasoning


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in the form that AsyncLLM.generate accepts."""

    token_ids: TokenIds
    params: SamplingParams
    answer_format: AnswerFormat | None


class ChatProcessor:
    """The checkpoint's chat template and the parsers for its answers.

    Raises:
        ConfigError: a configured parser is unknown, or its markers are not in the vocabulary.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, template: ChatTemplate, compiler: GrammarCompiler) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._compiler = compiler
        self._turns = TurnTokens(tokenizer, "\n".join((template.source, *tokenizer.special_tokens.values())))
        tools = _choose("tool_parser", config.tool_parser, TOOL_PARSERS, detect_tool_parser(template.source))
        detected = detect_reasoning_parser(template.source)
        reasoning = _choose("reasoning_parser", config.reasoning_parser, REASONING_PARSERS, detected)
        self._tool_parser = TOOL_PARSERS.get(tools)
        self._writer = None if self._tool_parser is None else self._tool_parser.writer()
        self._reasoning_parser = self._find_reasoning_parser(reasoning, config.reasoning_parser)
        self.description = f"tool calls: {tools}; reasoning: {reasoning if self._reasoning_parser else 'none'}"

    @property
    def calls_tools(self) -> bool:
        return self._tool_parser is not None

    @property
    def reasons(self) -> bool:
        return self._reasoning_parser is not None

    async def prepare(self, request: ChatRequest, params: SamplingParams) -> ChatPrompt:
        """Render and tokenize the conversation, and choose the parsers for its answers.

        Raises:
            InvalidRequestError: the template fails, or a tool's schema cannot be compiled.
            UnsupportedFieldError: the model has no form for tool calls, or no reasoning, that the request asks for.
        """
        tools = request.tools if request.tool_choice != "none" else None
        if tools and self._tool_parser is None:
            message = "this model's chat template has no known format for tool calls."
            raise UnsupportedFieldError(f"'tools' is not supported: {message}", param="tools")
        if params.thinking_token_budget is not None and self._reasoning_parser is None:
            raise _never_thinks("thinking_token_budget")
        seen = replace(request, tools=tools, template_kwargs=self._template_kwargs(request))
        mark("template")
        text = await self.render(seen)
        mark("tokenize")
        if request.add_special_tokens:
            token_ids: TokenIds = await self._tokenizer.encode(text, add_special_tokens=True, param="messages")
        else:
            token_ids = await self._turns.encode(text, request.owner, param="messages")
        thinking = self._thinking(token_ids, request.add_generation_prompt)
        if thinking is None:  # the answer has no reasoning for a budget to limit
            params = replace(params, thinking_token_budget=None)
            if not tools and params.logprobs is None:  # logprobs need a parser that finds the tokens of the text
                return ChatPrompt(token_ids, params, None)
        if tools and self._tool_parser is not None:
            mark("compile")
            calls = await self._tool_parser.form_of(request, params, self._tokenizer, self._compiler)
            params = replace(params, structured_outputs=calls)
        form = AnswerFormat(
            reasoning=self._reasoning_parser,
            thinking=thinking,
            tool_parser=self._tool_parser if tools else None,
            tools={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()},
            one_call=not request.parallel_tool_calls,
        )
        return ChatPrompt(token_ids, self._showing_markers(params, form), form)

    async def render(self, request: ChatRequest) -> str:
        """The text of the conversation's prompt. Raises as ChatTemplate.render."""
        shown = [_without_strict(tool) for tool in request.tools] if request.tools else None
        return await self._template.render(replace(request, tools=shown), self._writer)

    def _template_kwargs(self, request: ChatRequest) -> dict[str, Any] | None:
        effort = request.reasoning_effort
        if effort is None:
            return request.template_kwargs
        if self._reasoning_parser is None:
            raise _never_thinks("reasoning_effort")
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (request.template_kwargs or {})

    def _thinking(self, prompt: TokenIds, opens_turn: bool) -> ReasoningTokenIds | None:
        """The initial state of reasoning for answers to ``prompt``; None if the prompt ends after the reasoning."""
        parser = self._reasoning_parser
        if parser is None or not opens_turn:
            return None
        tail = self._tokenizer.backend.decode(list(prompt[-_TAIL_TOKENS:]), skip_special_tokens=False).rstrip()
        if tail.endswith(parser.end):
            return None
        return replace(self._marks, begun=tail.endswith(parser.start))

    def _showing_markers(self, params: SamplingParams, form: AnswerFormat) -> SamplingParams:
        """Keep special tokens in the text if markers are special tokens; the parsers search the text for markers."""
        special = form.thinking is not None and form.thinking.start_token_id in self._tokenizer.special_token_ids
        if special or (form.tool_parser is not None and form.tool_parser.keeps_special_tokens):
            return replace(params, skip_special_tokens=False)
        return params

    def _find_reasoning_parser(self, name: str, asked: str) -> ReasoningMarkers | None:
        parser = REASONING_PARSERS.get(name)
        if parser is None:
            return None
        start, end = (self._tokenizer.backend.token_to_id(marker) for marker in (parser.start, parser.end))
        if start is None or end is None:
            if asked != "auto":
                markers = f"{parser.start} and {parser.end}"
                raise ConfigError(f"reasoning_parser: {markers} are not tokens of this model's vocabulary.")
            return None
        closing = self._tokenizer.encode_now(parser.closing, add_special_tokens=False)
        self._marks = ReasoningTokenIds(start, end, tuple(closing) if end in closing else (end,), begun=False)
        return parser


def check_parsers(config: Config) -> None:
    """Raise ConfigError if a configured parser is unknown."""
    _choose("tool_parser", config.tool_parser, TOOL_PARSERS, None)
    _choose("reasoning_parser", config.reasoning_parser, REASONING_PARSERS, None)


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as the template renders it. ``strict`` is for the server, not for the model."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def _never_thinks(param: str) -> UnsupportedFieldError:
    message = f"'{param}' is not supported: this model does not think before it answers."
    return UnsupportedFieldError(message, param=param)


def _choose(knob: str, asked: str, known: Mapping[str, object], detected: str | None) -> str:
    if asked not in ("auto", "none", *known):
        raise ConfigError(f"{knob}: {asked!r} is not known; use auto, none, {', '.join(known)}.")
    return (detected or "none") if asked == "auto" else asked

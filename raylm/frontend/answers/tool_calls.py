"""ToolParser: finds tool calls in the text of one sequence while it arrives. Also chooses the parser for a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.outputs import ToolCallDelta
from raylm.frontend.text.chat_template import ChatRequest, WriteTools
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.lazy import Family
from raylm.params import SamplingParams, StructuredOutputs

Tools = Mapping[str, Mapping[str, Any]]
Mark = Callable[[str], str]
Parsed = list[tuple[str, list[ToolCallDelta]]]
"""Final parts in the order of the answer: content, and the calls after it."""


class ToolParser(ABC):
    """Interface of tool parsers. An object parses one sequence. The class describes the call format of a model family.

    ``tools`` maps function names to the schemas of their parameters. With ``one_call`` the text is ``over`` after the
    first call.
    """

    marker: ClassVar[str]  # first text of calls
    keeps_special_tokens: ClassVar[bool] = False  # markers are special tokens, so the detokenizer must keep them
    holds_calls: ClassVar[bool] = False  # every call has the right form, not only those of strict tools
    over: bool
    has_calls: bool

    @abstractmethod
    def __init__(self, tools: Tools, *, one_call: bool = False) -> None: ...

    @abstractmethod
    def push(self, text: str) -> Parsed:
        """Add the next piece of text. Returns the final parts."""

    @abstractmethod
    def flush(self) -> Parsed:
        """Return the text that is held back, at the end of the text."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Number of characters at the end of the text that may still become content or part of a call."""

    @classmethod
    @abstractmethod
    def serves(cls, template: str) -> bool:
        """Whether a chat template writes calls in the format of this parser."""

    @classmethod
    @abstractmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        """The format of calls in Lark: (one call, separator of two calls, further rules).

        The arguments of the function ``names[i]`` are the rule ``args_i``. ``mark`` converts a marker to a Lark
        expression.
        """

    @classmethod
    def free_text(cls) -> str:
        """Lark rule for an answer that may contain calls in the right format. Uses the rules TEXT and calls."""
        return "TEXT? (calls TEXT?)*"

    @classmethod
    def writer(cls) -> WriteTools | None:
        """The function that writes tools and calls as text of messages; None if the chat template writes them."""
        return None

    @classmethod
    @abstractmethod
    async def form_of(
        cls, request: ChatRequest, params: SamplingParams, tokenizer: Tokenizer, compiler: GrammarCompiler
    ) -> StructuredOutputs | None:
        """The form that an answer to ``request``, which has tools, must match; None for any text."""


TOOL_PARSERS = Family[type[ToolParser]]({
    "qwen3_coder": "raylm.frontend.answers.tool_parsers.qwen3_coder:Qwen3CoderParser",
    "hermes": "raylm.frontend.answers.tool_parsers.hermes:HermesParser",
    "mistral": "raylm.frontend.answers.tool_parsers.mistral:MistralParser",
    "llama3_json": "raylm.frontend.answers.tool_parsers.llama3_json:Llama3JSONParser",
    "prompt": "raylm.frontend.answers.tool_parsers.prompt:PromptParser",
})  # fmt: skip


def detect_tool_parser(template: str) -> str | None:
    """The name of the first parser whose format a chat template uses for calls."""
    return next((name for name, parser in TOOL_PARSERS.items() if parser.serves(template)), None)

"""ToolParser: finds the tool calls in the text of one sequence, as it comes; and the choice of one for a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.outputs import ToolCallDelta
from raylm.frontend.text.chat_template import ChatRequest
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.lazy import Family
from raylm.params import SamplingParams, StructuredOutputs

Tools = Mapping[str, Mapping[str, Any]]
Mark = Callable[[str], str]
Parsed = list[tuple[str, list[ToolCallDelta]]]
"""What is final, in the order of the answer: content, and the calls behind it."""


class ToolParser(ABC):
    """The interface of the members: an object reads one sequence, the class knows how a model writes calls.

    ``tools`` are the parameters' schemas by function; with ``one_call`` the text is ``over`` with the first call.
    """

    marker: ClassVar[str]  # what calls begin with
    keeps_special_tokens: ClassVar[bool] = False  # markers are special tokens, which a text shows only if asked to
    over: bool
    has_calls: bool

    @abstractmethod
    def __init__(self, tools: Tools, *, one_call: bool = False) -> None: ...

    @abstractmethod
    def push(self, text: str) -> Parsed:
        """Take in the next piece; return what is final."""

    @abstractmethod
    def flush(self) -> Parsed:
        """What is held back, once no more text comes."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Characters at the end of the text that may still become content or belong to a call."""

    @classmethod
    @abstractmethod
    def serves(cls, template: str) -> bool:
        """Whether a chat template writes calls in this parser's form."""

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

    @classmethod
    @abstractmethod
    async def form_of(
        cls, request: ChatRequest, params: SamplingParams, tokenizer: Tokenizer, compiler: GrammarCompiler
    ) -> StructuredOutputs | None:
        """The form of an answer to ``request``, which has tools; None if it is free."""


TOOL_PARSERS = Family[type[ToolParser]]({
    "qwen3_coder": "raylm.frontend.answers.tool_parsers.qwen3_coder:Qwen3CoderParser",
    "hermes": "raylm.frontend.answers.tool_parsers.hermes:HermesParser",
    "mistral": "raylm.frontend.answers.tool_parsers.mistral:MistralParser",
    "llama3_json": "raylm.frontend.answers.tool_parsers.llama3_json:Llama3JSONParser",
})  # fmt: skip


def detect_tool_parser(template: str) -> str | None:
    """The name of the first parser in whose form a chat template writes calls."""
    return next((name for name, parser in TOOL_PARSERS.items() if parser.serves(template)), None)

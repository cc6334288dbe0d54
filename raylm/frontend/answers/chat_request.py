"""ChatRequest and ChatPrompt: what a caller asks for the next turn of a conversation, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raylm.errors import InvalidRequestError
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.params import SamplingParams


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that the answer must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a caller asks for the next turn of a conversation, in the terms of OpenAI's chat completions.

    ``messages`` and ``tools`` have OpenAI's form, with arguments of earlier calls as objects or JSON texts.
    ``reasoning_effort`` goes to the template; "none" turns thinking off, everything else turns it on, unless
    ``template_kwargs`` say otherwise. ``any_length`` says that more than the context holds is fine.

    Raises:
        InvalidRequestError: the template shall both open a turn and leave the last one open.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    any_length: bool = False

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            message = "'continue_final_message' cannot be combined with 'add_generation_prompt'."
            raise InvalidRequestError(message, param="continue_final_message")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as AsyncLLM.generate takes it."""

    token_ids: list[int]
    params: SamplingParams
    answer_format: AnswerFormat | None

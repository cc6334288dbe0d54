"""What callers ask of AsyncLLM: RequestHead, beside any prompt, and ChatRequest, in place of one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from raylm.errors import InvalidRequestError
from raylm.messages import ServiceLevel

if TYPE_CHECKING:
    from raylm.frontend.admission.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request's id and how it is treated, whether it asks for text or for a vector.

    A lower ``priority`` is served earlier (under the priority policy). Only requests of the same ``cache_salt`` share
    cached prefixes. ``arrival_time`` is in seconds since the epoch. ``param`` is the field that errors about the prompt
    name. ``adapter`` names a LoRA adapter, None means the base model. ``place`` is that of the request in this replica,
    None where nobody admitted it. Of each sequence the caller has ``told`` tokens, None if it has all, () if it has
    nothing of any. What is drawn can be taken over under the name ``resumable_as`` ("" if not), and is if the request
    ``is_resumed``.
    """

    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.time)
    param: str = "prompt"
    adapter: str | None = None
    place: Place | None = None
    told: tuple[int | None, ...] = ()
    resumable_as: str = ""
    is_resumed: bool = False

    @property
    def service(self) -> ServiceLevel:
        """How it is to be served beside others."""
        return ServiceLevel() if self.place is None else self.place.service

    def nth(self, place: int, param: str | None = None) -> RequestHead:
        """The head of one of several prompts that came together, which may come from a field of its own."""
        return replace(self, request_id=f"{self.request_id}-{place}", param=param or self.param)


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
    ``template_kwargs`` say otherwise. ``add_special_tokens`` adds the tokenizer's to those that the template writes.
    ``any_length`` says that more than the context holds is fine.

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
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] | None = None
    any_length: bool = False

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            message = "'continue_final_message' cannot be combined with 'add_generation_prompt'."
            raise InvalidRequestError(message, param="continue_final_message")

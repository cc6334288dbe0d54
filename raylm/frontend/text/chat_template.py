"""ChatTemplate: renders conversations with the checkpoint's Jinja template, in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import orjson
from pydantic_core import from_json

from raylm.errors import InvalidRequestError
from raylm.frontend.text.template_process import Renderer, job
from raylm.frontend.text.tokenizer import check_chars
from raylm.frontend.threads import LARGE

RENDER_LIMIT_S = 5.0
_CHARS_A_THING = 32
_MAX_CUSTOM_ROLES = 64
_PROBE = "31415926535"  # a text that is in no template
ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
_RESERVED = frozenset({
    "messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask",
    "padding", "truncation", "max_length", "tokenizer_kwargs", "raise_exception", "strftime_now", "namespace",
    "dict", "range", "loop", "self",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequiredTool:
    """The tool that the answer must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | RequiredTool
WriteTools = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], list[dict[str, Any]]]
"""Takes prepared messages and the tools. Returns messages in which tools, calls and results are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next turn of a conversation, with the fields of OpenAI's chat completions.

    ``messages`` and ``tools`` have OpenAI's form, with arguments of earlier calls as objects or JSON text.
    ``reasoning_effort`` is passed to the template; "none" turns thinking off, any other value turns it on, unless
    ``template_kwargs`` sets ``enable_thinking``. ``add_special_tokens`` adds the tokenizer's special tokens to those of
    the template. With ``any_length`` the prompt may exceed the context. The token ids of its turns are kept for later
    requests of the same ``owner``; None keeps none.

    Raises:
        InvalidRequestError: both ``add_generation_prompt`` and ``continue_final_message`` are set.
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
    owner: str | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            message = "'continue_final_message' cannot be combined with 'add_generation_prompt'."
            raise InvalidRequestError(message, param="continue_final_message")


class ChatTemplate:
    """Templates of a checkpoint by name: ``default`` (may be missing), and optionally ``tool_use``, for tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], model: str) -> None:
        self._templates = dict(templates)
        self.source = "\n".join(templates.values())
        self._special_tokens = dict(special_tokens)
        self._model = model
        self._custom_roles: dict[tuple[str, str], bool] = {}
        self._small, self._large = Renderer(), Renderer()  # a short conversation never waits for a long one

    async def render(self, request: ChatRequest, write_tools: WriteTools | None = None) -> str:
        """Render a conversation to the text of a prompt.

        Rendering may take RENDER_LIMIT_S. Short conversations do not wait for long ones. With ``write_tools`` the
        template sees what it returns, and no tools.

        Raises:
            InvalidRequestError: the messages do not fit the template, or rendering fails or takes too long.
        """
        kwargs = request.template_kwargs or {}
        for name in kwargs:
            if name in _RESERVED or name in self._special_tokens or name.startswith("_"):
                message = f"chat_template_kwargs must not set {name[:40]!r}."
                raise InvalidRequestError(message, param="chat_template_kwargs")
        shown = request.tools if write_tools is None else None
        template = self._select(shown)
        large = _is_large((request.messages, request.tools, kwargs))

        def prepare() -> tuple[list[str], bytes]:
            check_chars(content_chars(request.messages), "messages")
            messages = prepare_messages(request.messages, continue_final_message=request.continue_final_message)
            roles = [message["role"] for message in messages]
            if write_tools is not None:
                messages = write_tools(messages, request.tools)
            fields = {
                "tools": shown,
                "add_generation_prompt": request.add_generation_prompt,
                "continue_final_message": request.continue_final_message,
                **self._special_tokens,
                **kwargs,
            }
            return roles, _job(template, messages, fields)

        roles, asked = await asyncio.to_thread(prepare) if large else prepare()
        renderer = self._large if large else self._small
        text = await _render(renderer, asked)
        await self._check_roles(roles, template, renderer)
        return text

    def close(self) -> None:
        self._small.close()
        self._large.close()

    async def _check_roles(self, roles: list[str], template: str, renderer: Renderer) -> None:
        """Raise InvalidRequestError for a role that the template omits, or renders as another role."""
        for place, role in enumerate(roles):
            if role in ROLES or await self._takes(role, template, renderer):
                continue
            where = f"messages[{place}].role"
            raise InvalidRequestError(f"'{where}': the chat template has no role {role[:40]!r}.", param=where)

    async def _takes(self, role: str, template: str, renderer: Renderer) -> bool:
        """Whether the template renders a message of this role with the role's name. Caches the latest results."""
        taken = self._custom_roles.get((role, template))
        if taken is None:
            conversation = [{"role": "user", "content": "Hi"}, {"role": role, "content": _PROBE}]
            fields = {"add_generation_prompt": False, **self._special_tokens}
            try:
                text = await _render(renderer, _job(template, conversation, fields))
            except InvalidRequestError:
                text = ""
            taken = _PROBE in text and role in text
            if len(self._custom_roles) >= _MAX_CUSTOM_ROLES:
                self._custom_roles.clear()
            self._custom_roles[role, template] = taken
        return taken

    def _select(self, tools: list[dict[str, Any]] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            where = "(neither chat_template.jinja nor chat_template in tokenizer_config.json)"
            message = f"The model '{self._model}' has no chat template {where}; use completions instead."
            raise InvalidRequestError(message, param="messages")
        return self._templates[name]


def _job(template: str, conversation: list[dict[str, Any]], fields: dict[str, Any]) -> bytes:
    try:
        return job("render", template, conversation, fields)
    except ValueError:
        message = "messages, tools and chat_template_kwargs must contain only JSON values."
        raise InvalidRequestError(message, param="messages") from None


async def _render(renderer: Renderer, asked: bytes) -> str:
    try:
        text, fault = await renderer.ask(asked, RENDER_LIMIT_S)
    except TimeoutError:
        fault = f"The chat template did not render the messages within {RENDER_LIMIT_S:g} s."
        raise InvalidRequestError(fault, param="messages") from None
    if text is None:
        raise InvalidRequestError(fault or "The chat template could not render the messages.", param="messages")
    return text


def _is_large(value: Any) -> bool:
    """Whether a value has more than LARGE items in JSON. A text counts one item for each _CHARS_A_THING characters."""
    found, stack = 0, [value]
    while stack and found <= LARGE:
        node = stack.pop()
        found += 1 + (len(node) // _CHARS_A_THING if isinstance(node, str) else 0)
        if isinstance(node, (dict, list, tuple)):
            stack += islice(node.values() if isinstance(node, dict) else node, LARGE + 1)
    return found > LARGE


def content_chars(messages: list[dict[str, Any]]) -> int:
    """Number of text characters in the messages' contents, with a line break for each part of a list."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    whole = sum(len(content) for content in contents if isinstance(content, str))
    return whole + sum(len(text) + 1 for text in texts if isinstance(text, str))


def prepare_messages(messages: list[dict[str, Any]], *, continue_final_message: bool = False) -> list[dict[str, Any]]:
    """Convert OpenAI's messages to the form of templates: contents as strings, tool arguments as objects."""
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    prepared = [_prepare_message(f"messages[{place}]", message) for place, message in enumerate(messages)]
    if continue_final_message and not (isinstance(prepared[-1].get("content"), str) and prepared[-1]["content"]):
        message = "continue_final_message needs a last message with text content."
        raise InvalidRequestError(message, param="continue_final_message")
    return prepared


def _prepare_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role.", param=where)
    prepared = {name: value for name, value in message.items() if value is not None}
    if message["role"] == "developer":
        prepared["role"] = "system"  # OpenAI's newer name; chat templates know only "system"
    if isinstance(message.get("content"), list):
        prepared["content"] = "\n".join(_part_text(where, part) for part in message["content"])
    if message.get("tool_calls"):
        prepared.setdefault("content", "")
        calls = enumerate(message["tool_calls"])
        prepared["tool_calls"] = [_prepare_call(f"{where}.tool_calls[{place}]", call) for place, call in calls]
    return prepared


def _part_text(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    raise InvalidRequestError(f"{where}.content may contain only text parts.", param=f"{where}.content")


def _prepare_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must have a function.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    given = {name: value for name, value in call.items() if value is not None}
    return given | {"function": {**function, "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call that a model made, as the object that templates and Anthropic's API expect.

    If a token limit cut the call, open strings, arrays and objects are closed, and a key without a value is dropped. A
    text that is not a JSON object becomes the value of a single key ``arguments``.
    """
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        try:
            found = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            found = None
    return found if isinstance(found, dict) else {"arguments": text}

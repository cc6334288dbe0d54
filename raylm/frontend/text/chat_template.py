"""ChatTemplate: renders conversations with the checkpoint's Jinja template, sandboxed and bounded in time."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import orjson
from jinja2 import TemplateError
from pydantic_core import from_json
from transformers.utils import chat_template_utils

from raylm.errors import ConfigError, InvalidRequestError
from raylm.frontend.text.bounded_template import BoundedEnvironment, begin
from raylm.frontend.text.tokenizer import check_chars
from raylm.frontend.threads import LARGE, Lanes

# transformers makes its environment of the class that this name has, and takes no other one.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment

RENDER_LIMIT_S = 5.0
_CHARS_A_THING = 32
_SHOWN_CHARS = 300
_MAX_CUSTOM_ROLES = 64
_PROBE = "31415926535"  # a text that no template holds
ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
_RESERVED = frozenset({
    "messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask",
    "padding", "truncation", "max_length", "tokenizer_kwargs", "raise_exception", "strftime_now", "namespace",
    "dict", "range", "loop", "self",
})  # fmt: skip


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


class ChatTemplate:
    """``templates`` of a checkpoint by name: ``default`` (or none), and perhaps ``tool_use``, for use with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], model: str) -> None:
        self._templates = dict(templates)
        self.source = "\n".join(templates.values())
        self._special_tokens = dict(special_tokens)
        self._model = model
        self._custom_roles: dict[tuple[str, str], bool] = {}
        self._lanes = Lanes("raylm-template")

    async def render(self, request: ChatRequest) -> str:
        """The prompt text of a conversation; of the request only what a template sees counts.

        It may take RENDER_LIMIT_S from when a thread begins with it; short ones do not wait for long ones.
        """
        kwargs = request.template_kwargs or {}
        for name in kwargs:
            if name in _RESERVED or name in self._special_tokens or name.startswith("_"):
                message = f"chat_template_kwargs must not set {name[:40]!r}."
                raise InvalidRequestError(message, param="chat_template_kwargs")
        template = self._select(request.tools)

        def work() -> str:
            check_chars(content_chars(request.messages), "messages")
            messages = prepare_messages(request.messages, continue_final_message=request.continue_final_message)
            text = _render(
                template,
                messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **{**self._special_tokens, **kwargs},
            )
            self._check_roles(messages, template)
            return text

        large = _is_large((request.messages, request.tools, kwargs))
        loop = asyncio.get_running_loop()
        job = _Job(work)
        try:
            async with asyncio.timeout(None) as clock:
                job.on_begin = lambda: clock.reschedule(loop.time() + RENDER_LIMIT_S)
                return await self._lanes.run(job.run, large=large)
        except TimeoutError:
            message = f"The chat template did not render the messages within {RENDER_LIMIT_S:g} s."
            raise InvalidRequestError(message, param="messages") from None
        finally:
            job.interrupt()

    def close(self) -> None:
        self._lanes.close()

    def _check_roles(self, messages: list[dict[str, Any]], template: str) -> None:
        """Refuse roles of which a template makes nothing, or only another one."""
        for place, message in enumerate(messages):
            role = message["role"]
            if role in ROLES or self._takes(role, template):
                continue
            where = f"messages[{place}].role"
            raise InvalidRequestError(f"'{where}': the chat template knows no role {role[:40]!r}.", param=where)

    def _takes(self, role: str, template: str) -> bool:
        """Whether a message of this role is shown with its role; of the last ones it is remembered."""
        taken = self._custom_roles.get((role, template))
        if taken is None:
            conversation = [{"role": "user", "content": "Hi"}, {"role": role, "content": _PROBE}]
            try:
                text = _render(template, conversation, add_generation_prompt=False, **self._special_tokens)
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


class _Interrupted(BaseException):
    """Raised inside a rendering thread that has run out of time; no Exception, so that nothing in it catches this."""


class _Job:
    """One call on a thread that another thread can break off; pure-Python loops end within a few bytecodes.

    Made on an event loop, which runs ``on_begin`` soon after the call has begun, unless it is over by then.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        self.on_begin: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._over = False

    def run(self) -> str:
        with self._lock:
            if self._over:
                raise TimeoutError
            self._thread = threading.get_ident()
        try:
            self._loop.call_soon_threadsafe(self._begun)
            return self._work()
        except _Interrupted:
            raise TimeoutError from None
        finally:
            # The lock decides: after this line nothing interrupts, so the thread is fit for its next job.
            with self._lock:
                self._thread = None

    def _begun(self) -> None:
        if not self._over:
            self.on_begin()

    def interrupt(self) -> None:
        """Break the call off if it runs, and keep it from starting if it does not yet."""
        with self._lock:
            self._over = True
            if self._thread is not None:
                target, error = ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(target, error)


def _render(template: str, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
    begin()
    try:
        rendered, _ = chat_template_utils.render_jinja_template([conversation], chat_template=template, **kwargs)
    except TemplateError as error:
        shown = str(error.message or type(error).__name__)[:_SHOWN_CHARS]
        raise InvalidRequestError(f"The chat template refused the messages: {shown}", param="messages") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, MemoryError) as error:
        message = f"The chat template could not render the messages ({type(error).__name__})."
        raise InvalidRequestError(message, param="messages") from error
    return str(rendered[0])


def _is_large(value: Any) -> bool:
    """Whether JSON holds more than LARGE values, of which a text counts for one in each _CHARS_A_THING characters."""
    found, stack = 0, [value]
    while stack and found <= LARGE:
        node = stack.pop()
        found += 1 + (len(node) // _CHARS_A_THING if isinstance(node, str) else 0)
        if isinstance(node, (dict, list, tuple)):
            stack += islice(node.values() if isinstance(node, dict) else node, LARGE + 1)
    return found > LARGE


def content_chars(messages: list[dict[str, Any]]) -> int:
    """Characters of the messages' contents as far as they are text, and a line break for each part of a list."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    whole = sum(len(content) for content in contents if isinstance(content, str))
    return whole + sum(len(text) + 1 for text in texts if isinstance(text, str))


def prepare_messages(messages: list[dict[str, Any]], *, continue_final_message: bool = False) -> list[dict[str, Any]]:
    """Bring OpenAI's messages into the form that templates expect: text as strings, tool arguments as objects."""
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
        prepared["role"] = "system"  # OpenAI's newer name for it; chat templates know only the older one
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
    raise InvalidRequestError(f"{where}.content may hold text parts only.", param=f"{where}.content")


def _prepare_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must hold a function.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = past_arguments(arguments)
    given = {name: value for name, value in call.items() if value is not None}
    return given | {"function": {**function, "arguments": arguments}}


def past_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call that a model made earlier, as the object that templates expect.

    A call that a limit of tokens cut has what is there of them: open strings, arrays and objects are closed, a key
    without a value is left out. A text that is no JSON object is the value of the only key, ``arguments``.
    """
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        try:
            found = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            found = None
    return found if isinstance(found, dict) else {"arguments": text}


def check_templates(templates: Mapping[str, str]) -> None:
    """Compile every template; ConfigError names the one that is no valid Jinja."""
    for name, template in templates.items():
        begin()
        try:
            chat_template_utils._compile_jinja_template(template)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"model: the chat template {name!r} is not valid: {error}") from error

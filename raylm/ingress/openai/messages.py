"""Chat messages and tools: from OpenAI's wire form, checked piece by piece, to the plain dicts that templates read."""

from __future__ import annotations

import orjson

from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import check_fields, check_optional, json_name, string_field, unsupported, wrong

_TEMPLATE_ROLE = {
    "developer": "system",  # OpenAI's newer name for it; chat templates know only the older one
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FIELDS = {
    "developer": {"role", "content", "name"},
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning", "reasoning_content"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_EMPTY_WHEN_ECHOED = ("refusal", "annotations", "audio", "function_call")  # of an answer sent back as history
_WRAPPED = "provider_specific_fields"


def template_messages(messages: list[JSONObject]) -> list[JSONObject]:
    """The messages for the chat template: contents as strings, tool calls' arguments parsed.

    Raises:
        InvalidRequestError: a role, field, or content part is wrong; ``param`` is its dotted path.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_tools(tools: list[JSONObject] | None) -> list[JSONObject] | None:
    """The tools for the chat template.

    Raises:
        InvalidRequestError: a tool is not a function with a name; ``param`` is its dotted path.
    """
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{index}]")
    return tools or None


def _message(message: JSONObject, path: str) -> JSONObject:
    role = message.get("role")
    if not isinstance(role, str) or role not in _TEMPLATE_ROLE:
        known = ", ".join(_TEMPLATE_ROLE)
        shown = f"'{clip(role, 30)}'" if isinstance(role, str) else json_name(role)
        raise wrong(f"{path}.role", f"expected one of {known}, but got {shown}")
    message = _unwrapped(message, path) if role == "assistant" else message
    _check_fields(message, _FIELDS[role], path)
    calls, content = message.get("tool_calls"), message.get("content")
    content = "" if content is None and calls else content
    rendered: JSONObject = {"role": _TEMPLATE_ROLE[role], "content": _content(content, f"{path}.content")}
    if calls:
        rendered["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            rendered[name] = string_field(message, name, path)
    if role == "tool":
        string_field(message, "tool_call_id", path)
    return rendered


def _unwrapped(message: JSONObject, path: str) -> JSONObject:
    """An answer as it was: litellm hands back what OpenAI's messages do not have in a field of its own."""
    own = {name: value for name, value in message.items() if name != _WRAPPED}
    wrapped = message.get(_WRAPPED) or {}
    if not isinstance(wrapped, dict):
        raise wrong(f"{path}.{_WRAPPED}", f"expected an object, but got {json_name(wrapped)}")
    _check_fields(wrapped, _FIELDS["assistant"], f"{path}.{_WRAPPED}")
    return wrapped | own


def _check_fields(holder: JSONObject, known: set[str], path: str) -> None:
    check_fields(holder, known | {name for name in _EMPTY_WHEN_ECHOED if not holder.get(name)}, path)


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(path, f"expected a string or an array of text parts, but got {json_name(content)}")
    if not content:
        raise wrong(path, "expected at least one part")
    return "\n".join(_text_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _text_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong(path, f"expected an object, but got {json_name(part)}")
    kind = string_field(part, "type", path)
    if kind != "text":
        raise unsupported(f"{path}.type", f"parts of type '{clip(kind, 30)}' are not supported; only text is.")
    _check_fields(part, {"type", "text"}, path)
    return string_field(part, "text", path)


def _tool_calls(calls: object, path: str) -> list[JSONObject]:
    if not isinstance(calls, list):
        raise wrong(path, f"expected an array, but got {json_name(calls)}")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> JSONObject:
    call = _function_object(call, path, {"type", "id", "index", "function"})
    function: JSONObject = call["function"]
    _check_fields(function, {"name", "arguments"}, f"{path}.function")
    where = f"{path}.function.arguments"
    arguments = string_field(function, "arguments", f"{path}.function")
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        raise wrong(where, "expected a string that holds a JSON object") from None
    if not isinstance(parsed, dict):
        raise wrong(where, f"expected a string that holds a JSON object, but it holds {json_name(parsed)}")
    name = string_field(function, "name", f"{path}.function")
    return {"type": "function", "id": string_field(call, "id", path), "function": {"name": name, "arguments": parsed}}


def _check_tool(tool: JSONObject, path: str) -> None:
    function = _function_object(tool, path, {"type", "function"})["function"]
    _check_fields(function, {"name", "description", "parameters", "strict"}, f"{path}.function")
    string_field(function, "name", f"{path}.function")
    check_optional(function, "description", str, "a string", f"{path}.function")
    check_optional(function, "parameters", dict, "an object", f"{path}.function")
    check_optional(function, "strict", bool, "a boolean", f"{path}.function")


def _function_object(value: object, path: str, fields: set[str]) -> JSONObject:
    """``value`` as {"type": "function", "function": {"name": …}, …}."""
    if not isinstance(value, dict):
        raise wrong(path, f"expected an object, but got {json_name(value)}")
    kind = string_field(value, "type", path)
    if kind != "function":
        raise unsupported(f"{path}.type", f"'{clip(kind, 30)}' is not supported; only function is.")
    _check_fields(value, fields, path)
    if not isinstance(value.get("function"), dict):
        raise wrong(f"{path}.function", f"expected an object, but got {json_name(value.get('function'))}")
    return value

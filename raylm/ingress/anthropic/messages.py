"""Anthropic's messages, system texts and tools, checked piece by piece, as those of a chat completion."""

from __future__ import annotations

import orjson

from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import check_fields, json_name, string_field, unsupported, wrong

# ``cache_control`` is a hint: equal beginnings are cached without it. ``citations`` are of documents, which there are
# none of.
_FIELDS = {
    "text": {"type", "text", "cache_control", "citations"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
}
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
_TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}


def chat_messages(messages: list[JSONObject]) -> list[JSONObject]:
    """The messages as chat messages; results of tools become messages of their own.

    Raises:
        InvalidRequestError: a role, block or field is wrong; ``param`` is its dotted path.
    """
    found: list[JSONObject] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            shown = f"'{clip(role, 30)}'" if isinstance(role, str) else json_name(role)
            raise wrong(f"{path}.role", f"expected user or assistant, but got {shown}")
        check_fields(message, {"role", "content"}, path)
        blocks = _blocks(message.get("content"), f"{path}.content", _BLOCKS[role])
        found += _turn(blocks) if role == "assistant" else _questions(blocks)
    return found


def system_text(system: object) -> str:
    """``system``, a string or text blocks.

    Raises:
        InvalidRequestError: it is neither.
    """
    if system is None:
        return ""
    return "\n".join(block["text"] for block in _blocks(system, "system", ("text",)))


def chat_tools(tools: list[JSONObject]) -> list[JSONObject]:
    """The tools as functions.

    Raises:
        InvalidRequestError: one is wrong; ``param`` is its dotted path.
    """
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: JSONObject, path: str) -> JSONObject:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        shown = f"'{clip(kind, 40)}'" if isinstance(kind, str) else json_name(kind)
        raise unsupported(f"{path}.type", f"{shown} is not supported; only custom tools are.")
    check_fields(tool, _TOOL_FIELDS, path)
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{path}.input_schema", f"expected an object, but got {json_name(tool.get('input_schema'))}")
    function = {"name": string_field(tool, "name", path), "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _turn(blocks: list[JSONObject]) -> list[JSONObject]:
    """An assistant's message."""
    turn: JSONObject = {"role": "assistant", "content": "".join(b["text"] for b in blocks if b["type"] == "text")}
    if thoughts := "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        turn["reasoning_content"] = thoughts
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    return [turn | {"tool_calls": calls} if calls else turn]


def _call(block: JSONObject) -> JSONObject:
    arguments = orjson.dumps(block["input"]).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _questions(blocks: list[JSONObject]) -> list[JSONObject]:
    """A user's message: first the results of tools, then what the user says."""
    found = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return [*found, {"role": "user", "content": "\n".join(texts)}] if texts else found


def _blocks(content: object, path: str, kinds: tuple[str, ...]) -> list[JSONObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(path, f"expected a string or an array of blocks, but got {json_name(content)}")
    if not content:
        raise wrong(path, "expected at least one block")
    return [_block(block, f"{path}[{index}]", kinds) for index, block in enumerate(content)]


def _block(block: object, path: str, kinds: tuple[str, ...]) -> JSONObject:
    if not isinstance(block, dict):
        raise wrong(path, f"expected an object, but got {json_name(block)}")
    kind = block.get("type")
    if kind not in kinds:
        shown = f"'{clip(kind, 30)}'" if isinstance(kind, str) else json_name(kind)
        raise unsupported(f"{path}.type", f"blocks of type {shown} are not supported here; {', '.join(kinds)} are.")
    check_fields(block, _FIELDS[kind], path)
    if kind == "tool_result":
        return {"type": kind, "tool_use_id": string_field(block, "tool_use_id", path), "content": _result(block, path)}
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise wrong(f"{path}.input", f"expected an object, but got {json_name(block.get('input'))}")
    for name in {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name")}[kind]:
        string_field(block, name, path)
    return block


def _result(block: JSONObject, path: str) -> str:
    """What a tool answered; that it failed is said in words."""
    content = block.get("content")
    texts = [] if content in (None, []) else _blocks(content, f"{path}.content", ("text",))
    text = "\n".join(part["text"] for part in texts)
    return f"Error: {text}" if block.get("is_error") else text

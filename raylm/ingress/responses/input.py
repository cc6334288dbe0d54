"""Items of the Responses API: what clients send as input, checked, given ids, and turned into chat messages."""

from __future__ import annotations

import uuid

from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import check_fields, json_name, string_field, unsupported, wrong
from raylm.ingress.responses.body import MAX_ITEMS

_ROLES = ("user", "system", "developer", "assistant")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_FIELDS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
    "reasoning": {"type", "id", "summary", "content", "encrypted_content", "status"},
}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def new_id(kind: str) -> str:
    """An id for a new item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_items(value: object) -> list[JSONObject]:
    """``input`` as items with ids, each in the form in which it can be listed.

    Raises:
        InvalidRequestError: an item is wrong; ``param`` is its dotted path.
        UnsupportedFieldError: its type is not served.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", f"expected a string or an array of items, but got {json_name(value)}")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise wrong("input", f"expected between 1 and {MAX_ITEMS} items")
    return [_item(item, f"input[{index}]") for index, item in enumerate(value)]


def count_input(value: object) -> int:
    """Items and their parts: what is to be walked through."""
    if not isinstance(value, list):
        return 1
    contents = (item.get("content") for item in value if isinstance(item, dict))
    return len(value) + sum(len(content) for content in contents if isinstance(content, list))


def chat_messages(items: list[JSONObject]) -> list[JSONObject]:
    """Checked items as chat messages; thoughts, text and calls that follow each other are one assistant's turn."""
    messages: list[JSONObject] = []
    for item in items:
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item.get("role", "assistant") != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        else:
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[JSONObject], item: JSONObject) -> None:
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if turn is None or (item["type"] == "message" and turn["content"]) or item["type"] == "reasoning":
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    if item["type"] == "message":
        turn["content"] = _joined(item["content"])
    elif item["type"] == "reasoning":
        turn["reasoning_content"] = _joined(item.get("content") or item["summary"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(parts: list[JSONObject]) -> str:
    return "\n".join(part["text"] if "text" in part else part["refusal"] for part in parts)


def _item(item: object, path: str) -> JSONObject:
    if not isinstance(item, dict):
        raise wrong(path, f"expected an object, but got {json_name(item)}")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _FIELDS:
        shown = f"'{clip(kind, 40)}'" if isinstance(kind, str) else json_name(kind)
        raise unsupported(f"{path}.type", f"items of type {shown} are not supported; {', '.join(_FIELDS)} are.")
    check_fields(item, _FIELDS[kind], path)
    item_id = item.get("id")
    if item_id is not None and not isinstance(item_id, str):
        raise wrong(f"{path}.id", f"expected a string, but got {json_name(item_id)}")
    head = {"id": item_id or new_id(kind), "type": kind, "status": "completed"}
    return head | _READ[kind](item, path)


def _message(item: JSONObject, path: str) -> JSONObject:
    role = item.get("role")
    if role not in _ROLES:
        shown = f"'{clip(role, 30)}'" if isinstance(role, str) else json_name(role)
        raise wrong(f"{path}.role", f"expected one of {', '.join(_ROLES)}, but got {shown}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": _parts(item.get("content"), f"{path}.content", kind)}


def _function_call(item: JSONObject, path: str) -> JSONObject:
    return {name: string_field(item, name, path) for name in ("call_id", "name", "arguments")}


def _function_call_output(item: JSONObject, path: str) -> JSONObject:
    output = item.get("output")
    text = output if isinstance(output, str) else _joined(_parts(output, f"{path}.output", "input_text"))
    return {"call_id": string_field(item, "call_id", path), "output": text}


def _reasoning(item: JSONObject, path: str) -> JSONObject:
    if item.get("encrypted_content") is not None:
        raise unsupported(f"{path}.encrypted_content", "thoughts are not encrypted here; send their content.")
    found: JSONObject = {"summary": _thoughts(item.get("summary"), f"{path}.summary", "summary_text")}
    if item.get("content"):
        found["content"] = _thoughts(item["content"], f"{path}.content", "reasoning_text")
    return found


def _thoughts(value: object, path: str, kind: str) -> list[JSONObject]:
    return _parts(value, path, kind) if value else []


_READ = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _parts(value: object, path: str, kind: str) -> list[JSONObject]:
    """A content as a list of text parts of this kind; refusals stay what they are."""
    if isinstance(value, str):
        return [_text(kind, value)]
    if not isinstance(value, list) or not value:
        raise wrong(path, f"expected a string or an array of text parts, but got {json_name(value)}")
    return [_part(part, f"{path}[{index}]", kind) for index, part in enumerate(value)]


def _part(part: object, path: str, kind: str) -> JSONObject:
    if not isinstance(part, dict):
        raise wrong(path, f"expected an object, but got {json_name(part)}")
    given = part.get("type")
    if given == "refusal":
        return {"type": "refusal", "refusal": string_field(part, "refusal", path)}
    if given not in _TEXT_PARTS:
        shown = f"'{clip(given, 30)}'" if isinstance(given, str) else json_name(given)
        raise unsupported(f"{path}.type", f"parts of type {shown} are not supported; only text is.")
    check_fields(part, {"type", "text", "annotations", "logprobs"}, path)
    return _text(kind, string_field(part, "text", path))


def _text(kind: str, text: str) -> JSONObject:
    part: JSONObject = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part

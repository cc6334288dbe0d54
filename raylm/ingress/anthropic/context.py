"""``context_management`` of a message: clears the results of old tool uses before the model sees the conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raylm.ingress.anthropic.body import ClearToolUses, CountTokensRequest
from raylm.ingress.http.body import JSONObject

B = TypeVar("B", bound=CountTokensRequest)
CountTokens = Callable[[CountTokensRequest], Awaitable[int]]

CLEARED = "[This result was removed to save context.]"


@dataclass(slots=True)
class Edited:
    """A body after its edits.

    Attributes:
        messages: The messages that the model sees.
        applied: ``applied_edits`` of the answer: the edits that changed the messages.
        original: The number of input tokens without the edits; None if no edit had to count them.
    """

    messages: list[Any]
    applied: list[JSONObject] = field(default_factory=list)
    original: int | None = None


async def edit(body: CountTokensRequest, count: CountTokens) -> Edited:
    """Apply the edits of ``body`` in their order. ``count`` counts the input tokens of a body."""
    edited = Edited(body.messages)
    tokens: int | None = None
    for rule in (body.context_management and body.context_management.edits) or ():
        if not isinstance(rule, ClearToolUses):
            continue
        uses = _results(edited.messages)
        if rule.trigger.type == "tool_uses" and len(uses) <= rule.trigger.value:
            continue
        if tokens is None:
            tokens = edited.original = await count(body)
        if rule.trigger.type == "input_tokens" and tokens <= rule.trigger.value:
            continue
        messages, num_cleared = _cleared(edited.messages, uses, rule)
        if not num_cleared:
            continue
        left = await count(with_messages(body, messages))
        if rule.clear_at_least is not None and tokens - left < rule.clear_at_least.value:
            continue
        edited.applied.append(
            {
                "type": rule.type,
                "cleared_tool_uses": num_cleared,
                "cleared_input_tokens": tokens - left,
            }
        )
        edited.messages, tokens = messages, left
    return edited


def with_messages(body: B, messages: list[Any]) -> B:
    """The body with other messages. Its edits are not applied again."""
    return body.model_copy(update={"messages": messages, "context_management": None})


def _results(messages: list[Any]) -> list[str]:
    """The ids of the tool uses that have a result, oldest first."""
    return [block["tool_use_id"] for block in _blocks(messages) if block["type"] == "tool_result"]


def _blocks(messages: list[Any]) -> list[Any]:
    contents = [message["content"] for message in messages]
    return [block for content in contents if isinstance(content, list) for block in content]


def _cleared(messages: list[Any], uses: list[str], rule: ClearToolUses) -> tuple[list[Any], int]:
    """Messages in which the results of ``uses`` are replaced, except the last ``keep`` and ``exclude_tools``.

    Returns the messages and the number of tool uses that were cleared now.
    """
    names = {block["id"]: block["name"] for block in _blocks(messages) if block["type"] == "tool_use"}
    old = uses[: max(len(uses) - rule.keep.value, 0)]
    chosen = {use for use in old if names.get(use) not in (rule.exclude_tools or ())}
    inputs = rule.clear_tool_inputs or ()
    num_cleared = 0

    def clear(block: Any) -> Any:
        nonlocal num_cleared
        if block["type"] == "tool_result" and block["tool_use_id"] in chosen and block.get("content") != CLEARED:
            num_cleared += 1
            return {**block, "content": CLEARED}
        if block["type"] == "tool_use" and block["id"] in chosen and (inputs is True or block["name"] in inputs):
            return {**block, "input": {}}
        return block

    changed = []
    for message in messages:
        content = message["content"]
        changed.append({**message, "content": [*map(clear, content)]} if isinstance(content, list) else message)
    return changed, num_cleared

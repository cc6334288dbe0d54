"""Delta: the new content of one event of a streamed completion, for chat or text, from any server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of the first choice: text, reasoning, parts of tool calls; ``finish`` and ``usage`` if present."""

    text: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether the event has content of the answer."""
        return bool(self.text or self.thoughts or self.calls)


def delta_of(event: dict[str, Any]) -> Delta:
    """Servers send reasoning as ``reasoning`` or ``reasoning_content``. If both are present, they are equal."""
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    told = choice.get("delta") or {}
    return Delta(
        choice.get("text") or told.get("content") or "",
        told.get("reasoning") or told.get("reasoning_content") or "",
        told.get("tool_calls") or [],
        choice.get("finish_reason") or "",
        event.get("usage") or {},
    )

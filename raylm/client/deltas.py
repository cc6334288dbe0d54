"""What one event of a streamed completion adds, of chat or of plain text, whichever server told it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """Of the first choice: text, thoughts, parts of tool calls; ``finish`` and ``usage`` where the event has them."""

    text: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether the event brings something of the answer itself."""
        return bool(self.text or self.thoughts or self.calls)


def delta_of(event: dict[str, Any]) -> Delta:
    """Thoughts come under two names, ``reasoning`` and ``reasoning_content``; where both are there, they are equal."""
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    told = choice.get("delta") or {}
    return Delta(
        choice.get("text") or told.get("content") or "",
        told.get("reasoning") or told.get("reasoning_content") or "",
        told.get("tool_calls") or [],
        choice.get("finish_reason") or "",
        event.get("usage") or {},
    )

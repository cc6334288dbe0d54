"""Scripted answers of a model with tools: ``PLAY [[[name, arguments], ...], ...]`` in a message lists calls by turn.

The model makes the calls of the next turn, which follows from the number of results after the line. After the last turn
it says ``Done.``. A turn can have, instead of a call, a text, an answer that never comes, or a cut connection.
"""

from __future__ import annotations

import json
from typing import Any

SAY, WAIT, CUT = "@say", "@wait", "@cut"
_PLAY = "PLAY "
_RESULT = "<tool_response>"  # the chat template writes it before each tool result


def said(prompt: str) -> str:
    """The text after the last ``PLAY`` of a prompt, or the whole prompt."""
    return prompt.rpartition(_PLAY)[2]


def turn_of(prompt: str) -> list[tuple[str, Any]]:
    """The calls of the next turn, with special names for texts, waits and cuts."""
    _, found, rest = prompt.rpartition(_PLAY)
    if not found:
        return [(SAY, "Done.")]
    turns, _ = json.JSONDecoder().raw_decode(rest)
    results = rest.count(_RESULT)
    for turn in turns:
        if results <= 0:
            return [(name, arguments) for name, arguments in turn]
        results -= sum(not name.startswith("@") for name, _ in turn)
    return [(SAY, "Done.")]


def answer_to(prompt: str) -> str:
    """The text of the next turn."""
    return "\n".join(_call(name, arguments) for name, arguments in turn_of(prompt) if name not in (WAIT, CUT))


def _call(name: str, arguments: Any) -> str:
    if name == SAY:
        return str(arguments)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

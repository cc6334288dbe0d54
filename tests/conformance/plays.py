"""What a model that uses tools says: it stands in a message as ``PLAY [[[name, arguments], ...], ...]``, turn by turn.

The model makes the calls of the next turn, by the number of results after the line, and after the last turn it says
``Done.``. In place of a call may stand a text, an answer that never comes, and a connection that is cut.
"""

from __future__ import annotations

import json
from typing import Any

SAY, WAIT, CUT = "@say", "@wait", "@cut"
_PLAY = "PLAY "
_RESULT = "<tool_response>"  # before each result of a tool, by the chat template


def said(prompt: str) -> str:
    """What follows the last play of a prompt, or the whole prompt."""
    return prompt.rpartition(_PLAY)[2]


def turn_of(prompt: str) -> list[tuple[str, Any]]:
    """The calls of the next turn, and words in place of calls."""
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

"""Tools for models whose chat template does not know them: this server describes tools and calls in the messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from raylm.frontend.answers.tool_calls import Mark
from raylm.frontend.answers.tool_parsers.hermes import END, HermesParser
from raylm.frontend.text.chat_template import WriteTools

_INTRODUCTION = """# Tools
You can call the functions below. Each line describes one function in JSON.
<tools>
{functions}
</tools>
To call a function, write one JSON object with its name and its arguments, between two markers:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter's name": "its value"}}}}
</tool_call>
Several calls follow each other in this form. The result of each call then comes between <tool_response> and
</tool_response>."""


class PromptParser(HermesParser):
    """Calls in the format of Hermes, which the system message describes. The template sees no tools.

    A grammar holds every call in its format, because the model may not have been trained on it.
    """

    holds_calls = True

    @classmethod
    def serves(cls, template: str) -> bool:
        return False  # it is only chosen by name

    @classmethod
    def rules(cls, names: Sequence[str], mark: Mark) -> tuple[str, str, str]:
        call, between, rules = super().rules(names, mark)
        marker = mark(cls.marker)
        return f"{marker} rest", between, f"rest: {call.removeprefix(marker)}\n{rules}"

    @classmethod
    def writer(cls) -> WriteTools:
        return write_tools


def write_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Write tools, calls and their results as text of system, assistant and user messages.

    The results of one turn, and the user's text after them, become one message of the user.
    """
    written: list[dict[str, Any]] = []
    after_results = False
    for message in messages:
        role, text = message["role"], message.get("content", "")
        new = message
        if role == "tool":
            new = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        elif calls := message.get("tool_calls"):
            parts = [text] if text else []
            parts += [_call(call["function"]) for call in calls]
            new = {key: value for key, value in message.items() if key != "tool_calls"}
            new["content"] = "\n".join(parts)
        if after_results and new["role"] == "user":
            written[-1] = {**written[-1], "content": f"{written[-1]['content']}\n{new['content']}"}
        else:
            written.append(new)
        after_results = role == "tool"
    return _described(written, tools) if tools else written


def _call(function: dict[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{PromptParser.marker}\n{json.dumps(called, ensure_ascii=False)}\n{END}"


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools at the end of the first system message, which is added if there is none."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(functions=functions)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [{**first, "content": "\n\n".join(filter(None, (first.get("content"), text)))}, *messages[1:]]

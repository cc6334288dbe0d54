"""Which tool parsers there are, in the order in which they are looked for; one is imported when it is considered."""

from __future__ import annotations

from raylm.frontend.answers.tool_parsers.base import ToolParser
from raylm.lazy import Family

TOOL_PARSERS = Family[type[ToolParser]]({
    "qwen3_coder": "raylm.frontend.answers.tool_parsers.qwen3_coder:Qwen3CoderParser",
    "hermes": "raylm.frontend.answers.tool_parsers.hermes:HermesParser",
    "mistral": "raylm.frontend.answers.tool_parsers.mistral:MistralParser",
    "llama3_json": "raylm.frontend.answers.tool_parsers.llama3_json:Llama3JSONParser",
})  # fmt: skip


def detect_tool_parser(template: str) -> str | None:
    """The name of the first parser in whose form a chat template writes calls."""
    return next((name for name, parser in TOOL_PARSERS.items() if parser.serves(template)), None)

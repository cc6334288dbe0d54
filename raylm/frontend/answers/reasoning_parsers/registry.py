"""Which reasoning parsers there are, in the order in which they are looked for; one is imported when considered."""

from __future__ import annotations

from raylm.frontend.answers.reasoning_parsers.base import ReasoningParser
from raylm.lazy import Family

REASONING_PARSERS = Family[type[ReasoningParser]]({
    "think": "raylm.frontend.answers.reasoning_parsers.think:ThinkParser",
    "mistral": "raylm.frontend.answers.reasoning_parsers.mistral:MistralReasoningParser",
    "seed_oss": "raylm.frontend.answers.reasoning_parsers.seed_oss:SeedOssParser",
})  # fmt: skip


def detect_reasoning_parser(template: str) -> str | None:
    """The name of the first parser whose markers a chat template speaks of."""
    return next((name for name, parser in REASONING_PARSERS.items() if parser.serves(template)), None)

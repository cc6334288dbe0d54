"""Which reasoning parsers there are, in the order in which they are looked for; one is imported when considered."""

from __future__ import annotations

from raylm.frontend.reasoning_parsers.base import ReasoningParser
from raylm.lazy import member

REASONING_PARSERS = {
    "think": "raylm.frontend.reasoning_parsers.think:ThinkParser",
    "mistral": "raylm.frontend.reasoning_parsers.mistral:MistralReasoningParser",
    "seed_oss": "raylm.frontend.reasoning_parsers.seed_oss:SeedOssParser",
}


def reasoning_parser_class(name: str) -> type[ReasoningParser]:
    """The parser of this name."""
    found: type[ReasoningParser] = member(REASONING_PARSERS[name])
    return found


def detect_reasoning_parser(template: str) -> str | None:
    """The name of the first parser whose markers a chat template speaks of."""
    return next((name for name in REASONING_PARSERS if reasoning_parser_class(name).serves(template)), None)

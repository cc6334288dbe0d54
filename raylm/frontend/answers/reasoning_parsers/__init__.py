"""Front door of the reasoning parsers: the interface, and the choice of one."""

from raylm.frontend.answers.reasoning_parsers.base import ReasoningParser
from raylm.frontend.answers.reasoning_parsers.registry import REASONING_PARSERS, detect_reasoning_parser

__all__ = ["REASONING_PARSERS", "ReasoningParser", "detect_reasoning_parser"]

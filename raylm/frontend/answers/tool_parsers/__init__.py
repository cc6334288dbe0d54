"""Front door of the tool parsers: the interface, and the choice of one."""

from raylm.frontend.answers.tool_parsers.base import ToolParser
from raylm.frontend.answers.tool_parsers.registry import TOOL_PARSERS, detect_tool_parser

__all__ = ["TOOL_PARSERS", "ToolParser", "detect_tool_parser"]

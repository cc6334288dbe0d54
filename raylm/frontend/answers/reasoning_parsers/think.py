"""Thoughts in <think> … </think>: DeepSeek-R1 and its distillates, Qwen3, QwQ, and the embedded model."""

from __future__ import annotations

from raylm.frontend.answers.reasoning_parsers.base import ReasoningParser


class ThinkParser(ReasoningParser):
    """The most usual pair of markers."""

    start = "<think>"
    end = "</think>"
    closing = "\n</think>\n\n"

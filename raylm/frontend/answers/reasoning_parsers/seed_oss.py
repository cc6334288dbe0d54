"""Thoughts in <seed:think> … </seed:think>: ByteDance's Seed-OSS."""

from __future__ import annotations

from raylm.frontend.answers.reasoning_parsers.base import ReasoningParser


class SeedOssParser(ReasoningParser):
    """As <think>, under another name."""

    start = "<seed:think>"
    end = "</seed:think>"
    closing = "</seed:think>"

"""Thoughts in [THINK] … [/THINK]: Mistral's reasoning models (Magistral)."""

from __future__ import annotations

from raylm.frontend.answers.reasoning_parsers.base import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    """Its markers are special tokens."""

    start = "[THINK]"
    end = "[/THINK]"
    closing = "[/THINK]"

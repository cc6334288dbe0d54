"""Markers in a text that comes in pieces: how much of it is settled while a marker may still be on its way."""

from __future__ import annotations


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker``, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def settled(text: str, *markers: str) -> int:
    """How many characters of ``text`` are final: not what may become one of ``markers``, nor white space before it."""
    return len(text[: len(text) - max(overlap(text, marker) for marker in markers)].rstrip())

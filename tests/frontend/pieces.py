"""Texts cut into pieces, as they come from an engine."""

from __future__ import annotations

import random


def cut(text: str, seed: int) -> list[str]:
    """``text`` in pieces of different lengths."""
    rng = random.Random(seed)
    pieces = []
    while text:
        length = rng.choice((1, 1, 2, 3, 7, 40))
        pieces.append(text[:length])
        text = text[length:]
    return pieces

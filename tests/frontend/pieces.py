"""Cuts texts into pieces, as an engine sends them."""

from __future__ import annotations

import random


def cut(text: str, seed: int) -> list[str]:
    """Cut ``text`` into pieces of random lengths."""
    rng = random.Random(seed)
    pieces = []
    while text:
        length = rng.choice((1, 1, 2, 3, 7, 40))
        pieces.append(text[:length])
        text = text[length:]
    return pieces

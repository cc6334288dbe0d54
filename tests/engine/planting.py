"""How faults are planted in the engine core, and the random lives that must catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.test_scheduler_properties import live

Patch = pytest.MonkeyPatch
LIVES = 600


def wrap(patch: Patch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by ``change(original, self, *args)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def lives() -> int:
    """The same random lives for every fault; returns how many sequences ended in them."""
    return sum(len(live(seed, length=70).answers) for seed in range(LIVES))


def caught(plant: Callable[[Patch], None], patch: Patch) -> bool:
    """Whether the lives catch a fault."""
    plant(patch)
    try:
        lives()
    except (AssertionError, KeyError, IndexError):
        return True
    return False

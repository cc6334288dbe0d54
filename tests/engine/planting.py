"""Plants faults in the engine core. The random runs must detect each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from raylm.errors import RayLMError
from tests.engine.test_scheduler_properties import live

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
LIVES = 600


def wrap(patch: Patch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by ``change(original, self, *args)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def faults_of(module: str) -> list[Plant]:
    """The functions of a module that plant a fault: their annotations are (patch: Patch) -> None."""
    annotations = {"patch": "Patch", "return": "None"}
    found = [
        value for value in vars(sys.modules[module]).values() if getattr(value, "__annotations__", 0) == annotations
    ]
    assert found, f"no function of {module} plants a fault"
    return found


def lives() -> int:
    """The same random runs for every fault. Returns the number of sequences that ended."""
    return sum(len(live(seed, length=70).answers) for seed in range(LIVES))


def caught(plant: Plant, patch: Patch) -> bool:
    """Whether the random runs detect a fault."""
    plant(patch)
    try:
        lives()
    except (AssertionError, KeyError, IndexError, ValueError, RayLMError):
        return True
    return False

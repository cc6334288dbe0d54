"""Names that are imported when they are first asked for: front doors of rooms, and members of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def front_door(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are at home in the modules that ``homes`` says."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


def member(place: str) -> Any:
    """The object at ``place``, which a registry writes as ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

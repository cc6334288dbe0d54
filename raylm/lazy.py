"""Imports on first use: for the public names of packages, and for the members of registries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def front_door(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package`` that imports its public names on first use.

    ``modules`` maps the path of a module, relative to the package, to its public names.
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


class Family(Mapping[str, T]):
    """A registry of alternatives in the order in which they are tried. A member is imported when it is looked up."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> T:
        return member(self._homes[name])  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._homes  # avoids an import, which may fail

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def member(place: str) -> Any:
    """Import the object at ``place``, written as ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

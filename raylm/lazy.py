"""Names that are imported when they are first asked for: front doors of packages, and members of families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def front_door(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``, whose public names are those of ``modules`` (paths relative to it)."""
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


class Family(Mapping[str, T]):
    """The members of a family in the order in which they are considered; each is imported when it is used."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> T:
        return member(self._homes[name])  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._homes  # without an import, which may fail

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def member(place: str) -> Any:
    """The object at ``place``, which a registry writes as ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

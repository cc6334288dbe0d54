"""Fields: the entries of config.json, checked as they are read.

Reading them here instead of through transformers' configuration classes spares each worker their import, which takes
longer than loading a small model.
"""

from __future__ import annotations

from typing import Any

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError


class Fields:
    """A checkpoint's config.json; ``defaults`` are its family's, for entries that are left out."""

    def __init__(self, checkpoint: Checkpoint, defaults: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self._values = {**defaults, **checkpoint.config}

    def get(self, name: str) -> Any:
        """The entry as it stands, None if there is none."""
        return self._values.get(name)

    def size(self, name: str, *, least: int = 1, fallback: str | None = None) -> int:
        """An integer from ``least`` on; the entry ``fallback`` stands in for one that is null or left out.

        Raises:
            ConfigError: it is something else, or missing.
        """
        value = self.get(name)
        if value is None and fallback is not None:
            return self.size(fallback, least=least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, value, f"an integer from {least} on")
        return value

    def number(self, name: str) -> float:
        """A finite number above zero.

        Raises:
            ConfigError: it is something else, or missing.
        """
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false.

        Raises:
            ConfigError: it is something else, or missing.
        """
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def error(self, name: str, value: object, wanted: str) -> ConfigError:
        """What to raise about an entry."""
        said = "is missing; it" if name not in self._values else f"is {value!r}; it"
        return ConfigError(f"config.json of {self.checkpoint.path}: {name} {said} must be {wanted}.")

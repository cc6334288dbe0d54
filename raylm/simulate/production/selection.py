"""Selection: the part of a trace that is converted, and its speed; and what the converters share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raylm.config import Frozen, faults
from raylm.errors import ConfigError

Line = dict[str, Any]
"""A line of a trace, with the fields of ``TraceLine``."""
Advance = Callable[[int], object]
"""Called with the number of bytes that were read, or of seconds that were drawn, since the last call."""
T = TypeVar("T", bound=BaseModel)


class Selection(Frozen):
    """The part of a trace that is converted."""

    speed: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor of the rate. Pauses of sessions are divided by it too."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of the requests, or of the sessions, drawn at random; of the rate of each client of ServeGen."""
    requests: int | None = Field(None, ge=1)
    """Most lines."""
    longest: int | None = Field(None, ge=2)
    """Most tokens of prompt and answer. A longer request is left out, and its session ends before it."""
    seed: int = 1
    """Of everything that is drawn."""

    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return self.longest is None or prompt_tokens + output_tokens <= self.longest

    def line(self, arrival: float, prompt_tokens: int, output_tokens: int, **fields: Any) -> Line:
        """A line for a request that arrived at ``arrival``, in seconds of the trace."""
        line = {"arrival": round(arrival / self.speed, 6), "prompt_tokens": prompt_tokens}
        return line | {"output_tokens": output_tokens} | fields


class TraceRecord(BaseModel):
    """A record of a trace. Unknown fields are ignored, because later releases may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def checked(model: type[T], given: object, where: str) -> T:
    """Validate one record. Raises ConfigError, which names its place and its field."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"{where}: {faults(error)}") from None


def text_lines(paths: Iterable[Path], advance: Advance) -> Iterator[tuple[str, int, str]]:
    """The lines of some files that are not empty: (place for errors, number in the file, text)."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    advance(len(raw))
                    if text := raw.decode().strip():
                        yield f"{path}, line {number}", number, text
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: it cannot be read: {error}") from None

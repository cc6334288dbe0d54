"""Short names of numpy's array types, and helpers for ragged columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
IntArray = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Mask = NDArray[np.bool_]


def slices(count: int, size: int) -> list[slice]:
    """Slices that cut ``count`` entries into pieces of ``size``."""
    return [slice(start, start + size) for start in range(0, count, size)]


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """(place, index within the place) of each entry, if place i has ``counts[i]`` entries, in the order of places."""
    places = np.repeat(np.arange(len(counts)), counts)
    return places, np.arange(len(places)) - (np.cumsum(counts) - counts)[places]

"""Short names of numpy's array types, and what ragged columns need."""

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
    """``count`` entries in pieces of ``size``."""
    return [slice(start, start + size) for start in range(0, count, size)]


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Of so many entries for each place, one place after the other: each entry's place, and its index within it."""
    places = np.repeat(np.arange(len(counts)), counts)
    return places, np.arange(len(places)) - (np.cumsum(counts) - counts)[places]

"""Worker: the counter-based random stream that makes a token depend on its own seed and position and on nothing else.

Every number is a pure function of (seed, position of the token in its sequence, index), so neighbours, order,
preemption and restarts cannot change it, and no generator state is kept. The function is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the finalizer of Stafford's variant 13),
nested: the n-th output of one generator is the state of the next. It was chosen over Philox4x32-10 because it takes
nine vector operations for 64 bits where Philox's ten rounds take about a hundred for 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def nth_output(states: Bits, index: Bits) -> Bits:
    """The ``index``-th output (from 0) of SplitMix64 at ``states``, broadcast; products wrap."""
    mixed = (index + np.uint64(1)) * _GAMMA + states
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stream_states(seeds: NDArray[np.int64], positions: NDArray[np.integer[Any]]) -> Bits:
    """The generator state of each (seed, position), both [R]."""
    return nth_output(seeds.astype(np.uint64), positions.astype(np.uint64))


def exponentials(states: Bits, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard exponential variates, positive and finite: one for each state [R] and index [n] or [R, n] of it."""
    bits = nth_output(states[:, None], index.astype(np.uint64)) >> np.uint64(12)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return np.negative(np.log(uniform, out=uniform), out=uniform)

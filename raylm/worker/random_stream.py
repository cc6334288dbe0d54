"""Worker: the counter-based random stream that makes a token depend on its own seed and position and on nothing else.

Every number is a pure function of (seed, position of the token in its sequence, purpose, index), so neighbours, order,
preemption and restarts cannot change it, and no generator state is kept. The function is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the finalizer of Stafford's variant 13),
nested: the n-th output of one generator is the state of the next. It was chosen over Philox4x32-10 because it takes 7
vector operations for 64 bits where Philox's ten rounds of emulated 32-bit products take about 100 for 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# 2**64 / golden ratio, and the finalizer's multipliers, as the signed 64-bit integers that torch computes with.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def nth_output(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The ``index``-th output (from 0) of SplitMix64 at ``states``; int64 both, broadcast; products wrap."""
    mixed = (index + 1) * _GAMMA + states
    mixed = (mixed ^ _shift_right(mixed, 30)) * _MULTIPLIER_1
    mixed = (mixed ^ _shift_right(mixed, 27)) * _MULTIPLIER_2
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """The logical shift that torch lacks for int64: its own copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def stream_states(seeds: NDArray[np.int64], positions: NDArray[np.integer[Any]], purposes: int) -> torch.Tensor:
    """One generator state for each purpose and each (seed, position): [purposes, R] int64 on the host."""
    of_position = nth_output(torch.from_numpy(seeds), torch.from_numpy(positions.astype(np.int64)))
    return nth_output(of_position, torch.arange(purposes)[:, None])


def exponentials(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, float64, positive and finite: one for each state [R] and index [n] or [R, n]."""
    bits = _shift_right(nth_output(states[:, None], index), 12)
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()

"""Ranks: who computes one model together, as its modules see it; and what each rank holds of a checkpoint's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raylm.errors import ConfigError


class Ranks(ABC):
    """The workers that hold one model between them, seen from one of them.

    Every rank calls the same operations in the same order, with tensors of the same shapes. What ``all_reduce`` gives
    is the same on all ranks, bit by bit.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, on all of them; ``x`` may be overwritten."""

    @abstractmethod
    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """Columns: each rank's ``x`` (rows, widths[rank]) side by side on rank 0; elsewhere ``x`` as it is."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x`` on all ranks; elsewhere it is overwritten."""

    @abstractmethod
    def least(self, values: list[int]) -> list[int]:
        """Of each value the least that any rank has."""

    def part(self, count: int) -> range:
        """Which of ``count`` entries are this rank's: runs whose lengths differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def widths(self, count: int) -> list[int]:
        """How many of ``count`` entries each rank has."""
        return [count * (rank + 1) // self.size - count * rank // self.size for rank in range(self.size)]


class Alone(Ranks):
    """One worker that holds all of its model."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """All there is."""
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """All there is."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Nobody else listens."""
        return x

    def least(self, values: list[int]) -> list[int]:
        """Its own."""
        return values


ALONE = Alone()


class Whole:
    """A rank holds all of a checkpoint's tensor."""

    def read(self, weights: Any, name: str) -> Tensor:
        """Read it from an open safetensors file."""
        found: Tensor = weights.get_tensor(name)
        return found


WHOLE = Whole()


@dataclass(frozen=True, slots=True)
class Shard(Whole):
    """A rank holds the entries ``part`` along ``dim`` (0 or 1), of which the checkpoint's tensor has ``count``."""

    dim: int
    part: range
    count: int

    def read(self, weights: Any, name: str) -> Tensor:
        """Read the part from an open safetensors file, and nothing else of the tensor.

        Raises:
            ConfigError: the tensor has another number of entries.
        """
        stored, entries = weights.get_slice(name), slice(self.part.start, self.part.stop)
        shape = tuple(stored.get_shape())
        if len(shape) <= self.dim or shape[self.dim] != self.count:
            raise ConfigError(
                f"model: the weight {name} has the shape {shape}, config.json asks for {self.count} along the "
                f"{('first', 'second')[self.dim]} dimension."
            )
        found: Tensor = stored[entries] if self.dim == 0 else stored[:, entries]
        return found

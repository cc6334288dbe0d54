"""Ranks: the interface between a model's modules and the workers that compute the model together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Ranks(ABC):
    """One of the workers that share a model.

    All must call the same operations, in the same order and with equal shapes.

    The result of ``all_reduce`` is bitwise equal on all ranks.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, on all ranks. May overwrite ``x``."""

    @abstractmethod
    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """Concatenate the columns of each rank's ``x`` (rows, widths[rank]) on rank 0. Returns ``x`` on other ranks."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x`` on all ranks. Overwrites it on other ranks."""

    @abstractmethod
    def all_reduce_min(self, values: list[int]) -> list[int]:
        """The minimum over ranks of each value."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In this context ``all_reduce`` returns its input: results have no meaning, and ranks do not wait."""
        yield

    def part(self, count: int, rank: int | None = None) -> range:
        """The part of ``count`` entries on a rank, by default this one. Sizes of parts differ by at most one."""
        rank = self.rank if rank is None else rank
        return range(count * rank // self.world_size, count * (rank + 1) // self.world_size)

    def widths(self, count: int) -> list[int]:
        """The number of ``count`` entries on each rank."""
        return [len(self.part(count, rank)) for rank in range(self.world_size)]


class SingleRank(Ranks):
    """The only worker of a model."""

    rank, world_size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_min(self, values: list[int]) -> list[int]:
        return values


SINGLE_RANK = SingleRank()

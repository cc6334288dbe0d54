"""Ranks: the workers that compute one model together, as its modules see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Ranks(ABC):
    """One of the workers that hold a model between them; all call the same operations, in the same order and shapes.

    What ``all_reduce`` gives is the same on all ranks, bit by bit.
    """

    rank: int
    world_size: int

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
    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Of each value the least that any rank has."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Meanwhile ``all_reduce`` gives back what it is given: results mean nothing, and nobody is waited for."""
        yield

    def part(self, count: int, rank: int | None = None) -> range:
        """Which of ``count`` entries are a rank's, this one's by default: runs whose lengths differ by at most one."""
        rank = self.rank if rank is None else rank
        return range(count * rank // self.world_size, count * (rank + 1) // self.world_size)

    def widths(self, count: int) -> list[int]:
        """How many of ``count`` entries each rank has."""
        return [len(self.part(count, rank)) for rank in range(self.world_size)]


class SingleRank(Ranks):
    """One worker that holds all of its model."""

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

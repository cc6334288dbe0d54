"""Ranks: the interface between a model's modules and the workers that compute the model together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One of ``count`` consecutive parts of a model's layers, counted from 0.

    The first stage has the embedding, the last one has the last norm and the head.
    """

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.count

    def layers(self, total: int, head: float) -> range:
        """The layers of this stage, of at least ``count`` in ``total``. The head costs as much as ``head`` layers.

        The stage that costs most costs as little as possible, because it decides the speed of all.
        """
        if self.count == 1:
            return range(total)
        others = self.count - 1
        last = min(range(1, total - others + 1), key=lambda own: (max(-(-(total - own) // others), own + head), -own))
        if self.is_last:
            return range(total - last, total)
        return range((total - last) * self.number // others, (total - last) * (self.number + 1) // others)


WHOLE = PipelineStage()


class Ranks(ABC):
    """One of the workers that share a model, or the layers of one ``stage`` of it.

    All must call the same operations, in the same order and with equal shapes.

    The result of ``all_reduce`` is bitwise equal on all ranks.
    """

    rank: int
    world_size: int
    stage: PipelineStage = WHOLE

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
    """The only worker of a model, or of a stage of it."""

    rank, world_size = 0, 1

    def __init__(self, stage: PipelineStage = WHOLE) -> None:
        self.stage = stage

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_min(self, values: list[int]) -> list[int]:
        return values


SINGLE_RANK = SingleRank()

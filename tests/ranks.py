"""Ranks for tests: several ranks in threads of this process over gloo, or one isolated rank with partial sums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from raylm.models import Ranks
from raylm.worker.distributed.process_group import DistributedRanks

T = TypeVar("T")
P = ParamSpec("P")
_LOCK = Lock()


class Apart(Ranks):
    """One of ``size`` ranks, without any connection to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        assert x.shape[1] == widths[self.rank]
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_min(self, values: list[int]) -> list[int]:
        return values


def one_at_a_time(work: Callable[P, T]) -> Callable[P, T]:
    """``work`` with a lock. A worker process packs weights in one thread only, so the kernels do not support more."""

    @wraps(work)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with _LOCK:
            return work(*args, **kwargs)

    return locked


def on_all_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """The results of ``work`` on each of ``size`` ranks that run in parallel."""
    store = HashStore()

    def run(rank: int) -> T:
        with torch.inference_mode():
            return work(DistributedRanks(store, rank, size, torch.device("cpu")))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))

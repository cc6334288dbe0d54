"""DistributedRanks: the process group by which a rank exchanges tensors with other ranks and notices their loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    Backend,
    FileStore,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Store,
)

from raylm.errors import PeerLostError
from raylm.models import SINGLE_RANK, PipelineStage, Ranks
from raylm.worker.distributed.rendezvous import LOOPBACK, Rendezvous, close_rendezvous

# Longest wait for the other ranks: at start they may read the same files one after the other.
TIMEOUT = timedelta(minutes=10)
_TEAR_DOWN_AS_IT_IS = "3"  # ErrorHandlingMode::SkipCleanUp of torch's ProcessGroupNCCL


class DistributedRanks(Ranks):
    """Uses gloo for tensors on the host and NCCL for tensors on GPUs.

    Operations on the host raise PeerLostError if another rank is lost, or does not answer within TIMEOUT. Operations on
    GPUs do not block the host, and NCCL has no timeout inside a CUDA graph: the device waits forever for a lost rank.
    The EngineCore notices the loss, as the Link of that rank ends, and the supervisor stops the other ranks.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, stage: PipelineStage | None = None
    ) -> None:
        self.rank, self.world_size, self.stage = rank, size, stage or PipelineStage()
        self._is_apart = False
        self._group = ProcessGroup(store, rank, size)
        with self._together():
            host, gpu = torch.device("cpu"), torch.device("cuda")
            self._group._register_backend(host, ProcessGroup.BackendType.GLOO, _gloo(store, rank, size))
            if device.type == "cuda":
                self._group._register_backend(gpu, ProcessGroup.BackendType.NCCL, _nccl(store, rank, size))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks; in place if ``x`` is contiguous."""
        x = x.contiguous()
        if self._is_apart:
            return x
        options = AllreduceOptions()  # the default operation is a sum
        options.asyncOp = False  # run on the current stream instead of a separate one
        with self._together():
            work = self._group.allreduce([x], options)
            if work is not None:
                work.wait()
        return x

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """Concatenate the parts of all ranks on rank 0. Each part is sent padded to the widest."""
        own = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths] if self.rank == 0 else []
        with self._together():
            self._group.gather(parts, own, 0).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1) if parts else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Send ``x`` of rank 0 to the other ranks, which overwrite theirs. ``x`` must be contiguous."""
        with self._together():
            self._group.broadcast(x, 0).wait()
        return x

    def all_reduce_min(self, values: list[int]) -> list[int]:
        x = torch.tensor(values, dtype=torch.int64)
        with self._together():
            self._group.allreduce(x, ReduceOp.MIN).wait()
        return [int(value) for value in x.tolist()]

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = f"Rank {self.rank} of {self.world_size} lost another one: {_first_line(error)}"
            raise PeerLostError(lost) from error


def join_ranks(rendezvous: Rendezvous, size: int, device: torch.device) -> Ranks:
    if size == 1:
        return SINGLE_RANK
    store = FileStore(rendezvous.path, size)  # a TCPStore would let any user of the machine join
    store.set_timeout(TIMEOUT)
    ranks = DistributedRanks(store, rendezvous.rank, size, device)
    ranks.all_reduce_min([0])  # every rank has the addresses of the others
    if rendezvous.rank == 0 and device.type != "cuda":  # NCCL uses the store later
        close_rendezvous(rendezvous)
    return ranks


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:200]


def host_group(store: Store, rank: int, size: int, address: str) -> ProcessGroup:
    """The group of ``size`` processes that meet in ``store``, for tensors on the host.

    The others reach this one at ``address``.
    """
    group = ProcessGroup(store, rank, size)
    found = _gloo(store, rank, size, address)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, found)
    return group


def _gloo(store: Store, rank: int, size: int, address: str = LOOPBACK) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupGloo

    kind: Any = ProcessGroupGloo  # torch's type stubs lack its options
    options = kind._Options()
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = TIMEOUT
    found: Backend = kind(PrefixStore("gloo", store), rank, size, options)
    return found


def _nccl(store: Store, rank: int, size: int) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # torch for CPUs does not have it

    # If a sum cannot finish, NCCL's watchdog ends the process without aborting the operation: after an abort the next
    # kernels of the stream would run on incomplete sums, and tokens would be drawn from them.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = _TEAR_DOWN_AS_IT_IS
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"  # blocking operations cannot be captured in a graph
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)

"""join_workers: connects all workers of an engine, the ranks of each stage and the stages of a pipeline."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroup, ReduceOp, Store, TCPStore

from raylm.config import EngineConfig
from raylm.errors import ConfigError, PeerLostError
from raylm.models import PipelineStage, Ranks, SingleRank
from raylm.worker.distributed.pipeline import PipelineLink
from raylm.worker.distributed.process_group import TIMEOUT, DistributedRanks, host_group, join_ranks
from raylm.worker.distributed.rendezvous import Rendezvous, close_rendezvous
from raylm.worker.features import Pipeline


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers of an engine, as one of them sees them.

    ``ranks`` are those of its stage, ``beside`` is the number of workers on its node, with itself.
    """

    ranks: Ranks
    beside: int
    pipeline: Pipeline
    group: ProcessGroup | None = None

    def all_min(self, values: list[int]) -> list[int]:
        """The minimum over all workers of each value. Waits for all workers."""
        if self.group is None:
            return self.ranks.all_reduce_min(values)
        x = torch.tensor(values, dtype=torch.int64)
        try:
            self.group.allreduce(x, ReduceOp.MIN).wait()
        except RuntimeError as error:
            stage = self.ranks.stage
            what = f"Stage {stage.number} of {stage.count} lost another one"
            raise PeerLostError(f"{what}: {str(error).splitlines()[0][:200]}") from error
        return [int(value) for value in x.tolist()]

    def agree(self, text: str) -> bool:
        """Whether ``text`` is the same on all workers."""
        own = zlib.crc32(text.encode())
        least, most = self.all_min([own, -own])
        return least == -most


def join_workers(rendezvous: Rendezvous, engine: EngineConfig, device: torch.device) -> Workers:
    """Connect a worker to all others.

    Raises:
        ConfigError: stages are not served on this device.
        PeerLostError: another worker did not come.
    """
    size, count = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if count == 1:
        return Workers(join_ranks(rendezvous, size, device), size, Pipeline())
    if device.type == "cuda":
        raise ConfigError("engine.pipeline_parallel_size: several stages are served on CPUs only.")
    number, rank = divmod(rendezvous.rank, size)
    stage = PipelineStage(number, count)
    store = _store(rendezvous, size * count)
    try:
        group = host_group(PrefixStore("workers", store), rendezvous.rank, size * count, rendezvous.address)
        ranks: Ranks = SingleRank(stage)
        if size > 1:
            ranks = DistributedRanks(PrefixStore(f"stage {number}", store), rank, size, device, stage)
        beside = _count_beside(group, rendezvous.address, size * count)
    except RuntimeError as error:
        what = f"Stage {number} of {count} lost another one"
        raise PeerLostError(f"{what}: {str(error).splitlines()[0][:200]}") from error
    if rendezvous.rank == 0:
        close_rendezvous(rendezvous)
    return Workers(ranks, beside, PipelineLink(group, ranks), group)


def _store(rendezvous: Rendezvous, size: int) -> Store:
    if not rendezvous.crosses_nodes:
        store: Store = FileStore(rendezvous.path, size)
        store.set_timeout(TIMEOUT)
        return store
    host, _, port = rendezvous.path.rpartition(":")
    return TCPStore(host, int(port), None, rendezvous.rank == 0, TIMEOUT, False, master_listen_fd=rendezvous.listener)


def _count_beside(group: ProcessGroup, address: str, size: int) -> int:
    """Number of workers on the node of ``address``. Returns when all workers have joined."""
    own = torch.tensor([zlib.crc32(address.encode())], dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(size)]
    group.allgather([found], [own]).wait()
    return sum(bool(other == own) for other in found)

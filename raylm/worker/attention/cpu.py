"""Paged attention on CPUs by the native kernel, one call per layer. src/attention.h of raylm/native describes it."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.models import AttentionSpec, heads_struct
from raylm.native import NativeError, batch_struct, kernels, paged_attention
from raylm.native import library as layout
from raylm.worker.attention.base import AttentionBackend, AttentionMetadata, StepLimits


class CpuBackend(AttentionBackend[layout.Batch]):
    """A pool of shape (2, blocks, block_size * kv_heads * head_dim), in the layout of the native kernel."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self, limits: StepLimits) -> None:
        self._block_size = limits.block_size
        self._native = kernels()

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        if device.type != "cpu":
            return ["it computes on CPUs only"]
        reasons = []
        try:
            kernels()
        except NativeError as error:
            reasons.append(str(error))
        if dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"it has no {dtype}")
        if spec.head_dim % layout.LANES:
            reasons.append(f"head_dim {spec.head_dim} is not a multiple of {layout.LANES}")
        return reasons

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        return (2, num_blocks, block_size * spec.num_kv_heads * spec.head_dim)

    def prepare(self, metadata: AttentionMetadata) -> layout.Batch:
        starts = metadata.query_start_loc
        counts = (starts[1:] - starts[:-1]).long()
        ends = metadata.seq_lens.long()
        positions = torch.arange(len(metadata.slot_mapping)) + torch.repeat_interleave(ends - starts[1:], counts)
        return self.batch(metadata, positions)

    def batch(self, metadata: AttentionMetadata, positions: Tensor) -> layout.Batch:
        """The struct of a step for the kernels. ``positions`` (tokens,) int64 are those of its tokens."""
        m = metadata
        return batch_struct(positions, m.slot_mapping, m.block_tables, m.seq_lens, m.query_start_loc, self._block_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: layout.Batch, layer: AttentionSpec) -> Tensor:
        return paged_attention(self._native, q, k, v, kv, plan, heads_struct(layer))

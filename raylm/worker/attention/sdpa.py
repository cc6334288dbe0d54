"""Paged attention by torch's scaled_dot_product_attention over gathered pages. The reference, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raylm.models import AttentionSpec
from raylm.worker.arrays import Ints
from raylm.worker.attention.base import AttentionMetadata, PagedBackend, StepLimits, kv_places

_GROUP_TOKENS = 65_536  # most gathered tokens of one group of decodes, including padding
_TILE_SCORES = 1 << 24  # most entries of one prefill mask


@dataclass(frozen=True, slots=True)
class Read:
    """The queries of one attention call: one each of several sequences of similar length, or several of one sequence.

    ``queries`` are their indexes among the step's tokens, a slice if they are adjacent. ``slots`` (seqs * width,) are
    the slots that they read, sequence by sequence. ``mask``, (seqs, 1, 1, width) or (queries, width), is False where a
    query must not see a slot. It is None if there is no padding, or if the queries of one sequence are fully causal.
    """

    is_decode: bool
    queries: Tensor | slice
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The plan of one step. The reads are computed once for each sliding window of the layers."""

    metadata: AttentionMetadata
    reads: dict[int | None, list[Read]] = field(default_factory=dict)


class SdpaBackend(PagedBackend[SdpaPlan]):
    """Computes decodes in padded groups and prefills one by one.

    Padding repeats the sequence's own first token, so that no slot of another sequence is read: a mask hides any key,
    but 0 times NaN in a value is NaN.
    """

    name = "sdpa"

    def __init__(self, limits: StepLimits) -> None:
        self._block_size = limits.block_size

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        return []

    def prepare(self, metadata: AttentionMetadata) -> SdpaPlan:
        return SdpaPlan(metadata)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: SdpaPlan, layer: AttentionSpec) -> Tensor:
        pool = kv_places(kv, plan.metadata, layer)
        pool.write(k, v)
        if layer.sliding_window not in plan.reads:
            plan.reads[layer.sliding_window] = self._reads(plan.metadata, layer.sliding_window)
        out = torch.empty_like(q)
        for read in plan.reads[layer.sliding_window]:
            out[read.queries] = _attend(q[read.queries], pool.keys, pool.values, read, layer)
        return out

    def _reads(self, meta: AttentionMetadata, window: int | None) -> list[Read]:
        decodes = meta.seq_lens_host[: meta.num_decodes]
        seen = decodes if window is None else np.minimum(decodes, window)
        groups = [self._decode_group(meta, members, seen) for members in group_by_length(seen)]
        prefills = range(meta.num_decodes, len(meta.seq_lens_host))
        return groups + [tile for seq in prefills for tile in self._prefill_tiles(meta, seq, window)]

    def _decode_group(self, meta: AttentionMetadata, members: Ints, seen: NDArray[np.int32]) -> Read:
        device = meta.seq_lens.device
        queries: Tensor | slice = slice(int(members[0]), int(members[-1]) + 1)
        if members[-1] - members[0] + 1 != len(members):
            queries = torch.from_numpy(members).to(device)
        counts = torch.from_numpy(seen[members]).to(device)[:, None]
        offsets = torch.arange(int(seen[members].max()), device=device)
        valid = offsets < counts
        positions = meta.seq_lens[queries][:, None] - counts + torch.where(valid, offsets, 0)
        slots = self._slots(meta.block_tables[queries], positions).flatten()
        padded = bool((seen[members] != seen[members[0]]).any())
        return Read(True, queries, slots, valid[:, None, None, :] if padded else None)

    def _prefill_tiles(self, meta: AttentionMetadata, seq: int, window: int | None) -> list[Read]:
        start, end = map(int, meta.query_start_loc_host[seq : seq + 2])
        length = int(meta.seq_lens_host[seq])
        past = length - (end - start)
        positions = torch.arange(length, device=meta.seq_lens.device)
        slots = self._slots(meta.block_tables[seq][None], positions[None])[0]
        if past == 0 and (window is None or length <= window):
            return [Read(False, slice(start, end), slots, None)]
        rows = max(1, _TILE_SCORES // length)
        tiles = []
        for first in range(start, end, rows):
            last = min(first + rows, end)
            low = 0 if window is None else max(0, past + first - start + 1 - window)
            high = past + last - start
            mask = causal_mask(positions[past + first - start : high], positions[low:high], window)
            tiles.append(Read(False, slice(first, last), slots[low:high], mask))
        return tiles

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        blocks = block_tables.gather(1, positions // self._block_size)
        return blocks.long() * self._block_size + positions % self._block_size


def group_by_length(lengths: NDArray[np.int32]) -> list[Ints]:
    """Split sequences into groups, each ascending, that at most double their tokens by padding and stay bounded."""
    order = np.argsort(-lengths, kind="stable")
    groups, begin = [], 0
    for at in range(1, len(order) + 1):
        longest = lengths[order[begin]]
        if at == len(order) or 2 * lengths[order[at]] < longest or (at + 1 - begin) * longest > _GROUP_TOKENS:
            groups.append(np.sort(order[begin:at]))
            begin = at
    return groups


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """(queries, keys) bool from their positions: whether a query sees a key."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend(q: Tensor, keys: Tensor, values: Tensor, read: Read, layer: AttentionSpec) -> Tensor:
    """``q`` (seqs or queries, num_heads, head_dim) -> as q, of pools (slots, kv_heads, head_dim).

    In a decode the query heads of one kv head stand as its queries.
    """
    seqs = len(q) if read.is_decode else 1
    k, v = (pool.index_select(0, read.slots).view(seqs, -1, *pool.shape[1:]).transpose(1, 2) for pool in (keys, values))
    if read.is_decode:
        folded = q.view(seqs, layer.num_kv_heads, -1, layer.head_dim)
        if layer.softcap is not None:
            return _capped(folded, k, v, read.mask, layer.scale, layer.softcap).reshape(q.shape)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=read.mask, scale=layer.scale).reshape(q.shape)
    whole, causal = q.transpose(0, 1)[None], read.mask is None
    if layer.softcap is not None:
        mask = torch.ones(len(q), k.shape[2], dtype=torch.bool, device=q.device).tril() if causal else read.mask
        k, v = (heads.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1) for heads in (k, v))
        return _capped(whole, k, v, mask, layer.scale, layer.softcap)[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(whole, k, v, read.mask, is_causal=causal, scale=layer.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention with soft capping, which torch does not have: (.., queries, head_dim), (.., keys, head_dim) -> as q."""
    scores = softcap * torch.tanh((q.float() * (scale / softcap)) @ k.float().transpose(-1, -2))
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ v.float()).to(q.dtype)

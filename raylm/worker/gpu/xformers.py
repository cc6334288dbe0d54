"""Paged attention on NVIDIA GPUs by xformers' split-k operator: decodes as they are, prompts in tiles of queries.

A step mixes sequences with one token and prompts with many, and the operator takes one number of queries for all. So a
prompt's new tokens are cut into pseudo-sequences that share its block table, each as long as the sequence is at its
last query. A tile of Q queries, with G query heads to a key-value head, holds Q * G = 128 rows against each key
(``queries_per_tile``): tiles read no more than FlashAttention-2 does, whose tiles hold 128 queries of a single head.
Attending to past and new tokens by a kernel each, and merging both, would move two partial results more. This is
reckoned; it has not been timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from raylm.models import AttentionSpec, KVPlaces
from raylm.worker.attention.base import AttentionMetadata, PagedBackend, StepLimits, write_kv
from raylm.worker.gpu.batch_buckets import bucket, buckets, table_width, table_widths
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import HEAD_DIMS, Pages, SplitK, queries_per_tile, refusals

_FEW = 32  # programs of xformers' kernel that merges splits


@dataclass(frozen=True, slots=True)
class Tiles:
    """The prompts of a step in tiles of equally many queries, those of a prompt one after the other.

    A prompt's first tile begins with padding. ``sources`` (tiles * queries,) say which token of the step stands at each
    place, any where it is padding; ``places`` (tokens of prompts,) where each of those tokens stands.
    """

    pages: Pages
    sources: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class XformersPlan:
    """One step; the tiles are worked out once for every number of queries that layers take."""

    metadata: AttentionMetadata
    decodes: Pages | None
    tiles: dict[int, Tiles] = field(default_factory=dict)


class XformersBackend(PagedBackend[XformersPlan]):
    """Sequences and their tables are padded to buckets: graphs have fixed shapes, and the kernel is compiled for each
    width and number of splits. What pads has no tokens, and reads none.
    """

    name = "xformers"
    device_type = "cuda"
    capturable = True

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._attend = SplitK(limits.block_size)

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        if device.type != "cuda":
            return ["it computes on NVIDIA GPUs only"]
        reasons = refusals(dtype, device)
        if spec.head_dim not in HEAD_DIMS:
            reasons.append(f"it has no head_dim {spec.head_dim}, only {', '.join(map(str, sorted(HEAD_DIMS)))}")
        if spec.sliding_window is not None:
            reasons.append("it has no sliding windows over pages")
        if spec.softcap is not None:
            reasons.append("it has no soft capping of scores")
        if not reasons and (wrong := probe(cls, replace(spec, layer=0), dtype, device, block_size)):
            reasons.append(wrong)
        return reasons

    def compile_all(self, layers: Sequence[tuple[AttentionSpec, Tensor]]) -> None:
        """Attend by every kernel that steps may need, of sequences without tokens."""
        found: dict[AttentionSpec, Tensor] = {replace(spec, layer=0): kv for spec, kv in layers}
        calls = [
            (spec, kv, count, width, queries)
            for spec, kv in found.items()
            for width in table_widths(self._limits)
            for queries, most in ((1, self._limits.max_num_seqs), (queries_per_tile(spec), self._most_tiles(spec)))
            for count in buckets(most)
        ]
        seen = set()
        for spec, kv, count, width, queries in tqdm(
            calls, desc="Compiling attention", unit="shape", delay=1.0, file=sys.stderr
        ):
            choice = self._attend.choice(count, width, queries, spec, kv.device)
            # The kernel that merges splits has more warps where there are few sequences, and other strides for one.
            key = spec, queries, width, choice, count * spec.num_heads < _FEW, count == 1
            if key not in seen:
                seen.add(key)
                self._compile(spec, kv, count, width, queries)

    def _most_tiles(self, spec: AttentionSpec) -> int:
        """How many tiles a step's prompts have at most, each of which may end with one that is not full."""
        return self._limits.max_num_tokens // queries_per_tile(spec) + self._limits.max_num_seqs

    def _compile(self, spec: AttentionSpec, kv: Tensor, count: int, width: int, queries: int) -> None:
        device = kv.device
        tables = torch.zeros(
            count, self._limits.max_blocks if queries == 1 else width, dtype=torch.int32, device=device
        )
        pages = Pages(tables[:, :width], torch.zeros(count, dtype=torch.int32, device=device), queries)
        keys, values = kv.flatten(1, 2).unbind(0)
        self._attend(kv.new_zeros(count * queries, spec.num_heads, spec.head_dim), keys, values, pages, spec)

    def prepare(self, metadata: AttentionMetadata) -> XformersPlan:
        count = metadata.num_decodes
        if not count:
            return XformersPlan(metadata, None)
        width = table_width(int(metadata.seq_lens_host[:count].max()), self._limits)
        lengths = F.pad(metadata.seq_lens[:count], (0, bucket(count) - count))
        return XformersPlan(metadata, Pages(metadata.block_tables[:count, :width], lengths, 1))

    def places(self, kv: Tensor, plan: XformersPlan) -> KVPlaces:
        keys, values = kv.flatten(1, 2).unbind(0)
        return KVPlaces(keys, values, plan.metadata.slot_mapping)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: XformersPlan, layer: AttentionSpec) -> Tensor:
        write_kv(kv, k, v, plan.metadata)
        return self.attend(q, kv, plan, layer)

    def attend(self, q: Tensor, kv: Tensor, plan: XformersPlan, layer: AttentionSpec) -> Tensor:
        keys, values = kv.flatten(1, 2).unbind(0)
        parts = []
        if plan.decodes is not None:
            rows = _padded(q, len(plan.decodes.lengths))
            parts.append(self._attend(rows, keys, values, plan.decodes, layer)[: plan.metadata.num_decodes])
        if plan.metadata.num_decodes < len(plan.metadata.seq_lens_host):
            queries = queries_per_tile(layer)
            if queries not in plan.tiles:
                plan.tiles[queries] = self._cut(plan.metadata, queries)
            tiles = plan.tiles[queries]
            out = self._attend(q.index_select(0, tiles.sources), keys, values, tiles.pages, layer)
            parts.append(out.index_select(0, tiles.places))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cut(self, meta: AttentionMetadata, queries: int) -> Tiles:
        first, lengths = meta.num_decodes, meta.seq_lens_host[meta.num_decodes :]
        counts = np.diff(meta.query_start_loc_host[first:])
        tiles = -(-counts // queries)
        padding = tiles * queries - counts
        places = np.arange(counts.sum()) + np.repeat(np.cumsum(padding), counts)
        total, size = int(tiles.sum()), bucket(int(tiles.sum()))
        sources = np.zeros(size * queries, np.int64)
        sources[places] = meta.query_start_loc_host[first] + np.arange(len(places))
        # How many tiles come behind each one in its prompt, whose last token the last of them ends with.
        behind = np.repeat(np.cumsum(tiles), tiles) - 1 - np.arange(total)
        ends = np.zeros(size, np.int32)
        ends[:total] = np.repeat(lengths, tiles) - behind * queries
        owners = np.repeat(np.arange(first, first + len(tiles)), tiles)
        device = meta.block_tables.device
        owned, seen, read, written = (torch.from_numpy(at).to(device) for at in (owners, ends, sources, places))
        tables = meta.block_tables[:, : table_width(int(lengths.max()), self._limits)]
        return Tiles(Pages(tables.index_select(0, owned), seen, queries), read, written)


def _padded(q: Tensor, count: int) -> Tensor:
    """The first ``count`` rows of ``q``; zeros where it has fewer."""
    return q[:count] if len(q) >= count else F.pad(q, (0, 0, 0, 0, 0, count - len(q)))

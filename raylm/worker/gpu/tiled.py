"""Paged attention on NVIDIA GPUs with kernels over pages: decodes as sequences, prompts as tiles of queries.

A step has sequences with one token and prompts with many tokens, but the kernels use one number of queries for all. So
a prompt's new tokens are cut into pseudo-sequences that share its block table. Each is as long as the sequence at its
last query. A tile of Q queries, with G query heads for each key-value head, has Q * G = 128 rows against each key
(``queries_per_tile``). Tiles read no more than FlashAttention-2, whose tiles have 128 queries of one head. Separate
kernels for past and new tokens, with a merge, would move two more partial results. This is calculated, not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from raylm.models import AttentionSpec, KVPlaces
from raylm.worker.arrays import Ints
from raylm.worker.attention.base import AttentionMetadata, PagedBackend, StepLimits, kv_places
from raylm.worker.gpu.batch_buckets import bucket, buckets, table_width, table_widths
from raylm.worker.gpu.split_k import Pages, queries_per_tile

_FEW = 32  # programs of xformers' kernel that merges splits
_MORE_TILES = 16  # partial tiles in a plan with fixed memory, besides full ones: for about as many prompts


@dataclass(frozen=True, slots=True)
class Cut:
    """The tiles of a step's prompts, on the host. The tiles of a prompt are consecutive.

    A prompt's first tile begins with padding. ``owners`` and ``ends`` (tiles,) are the sequence of each tile, and its
    number of tokens at the tile's end. ``sources`` (tiles * queries,) is the token of the step in each place, any token
    in padding. ``places`` (tokens of prompts,) is the place of each token.
    """

    owners: Ints
    ends: Ints
    sources: Ints
    places: Ints

    @classmethod
    def of(cls, meta: AttentionMetadata, queries: int) -> Cut:
        first, lengths = meta.num_decodes, meta.seq_lens_host[meta.num_decodes :]
        counts = np.diff(meta.query_start_loc_host[first:])
        tiles = -(-counts // queries)
        padding = tiles * queries - counts
        places = np.arange(counts.sum()) + np.repeat(np.cumsum(padding), counts)
        total = int(tiles.sum())
        sources = np.zeros(total * queries, np.int64)
        sources[places] = meta.query_start_loc_host[first] + np.arange(len(places))
        # The number of later tiles in the same prompt. The last tile ends with the prompt's last token.
        behind = np.repeat(np.cumsum(tiles), tiles) - 1 - np.arange(total)
        ends = np.repeat(lengths, tiles) - behind * queries
        owners = np.repeat(np.arange(first, first + len(tiles)), tiles)
        return cls(owners, ends.astype(np.int64), sources, places)


class Tiles:
    """A Cut on the device, padded to a number of ``tiles``, in memory with fixed addresses.

    The memory on the host exists twice, because two steps may be in progress.

    ``sources`` (tiles * queries,) is as in Cut. ``outputs`` (tokens,) is the row of each token of the step, where rows
    of decodes come first, then rows of tiles.
    """

    def __init__(self, tiles: int, queries: int, tokens: int, width: int, device: torch.device) -> None:
        self._tiles, self._rows = tiles, tiles * queries
        size = 2 * tiles + self._rows + tokens
        self._staged = [torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)]
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        parts = torch.split_with_sizes(self._on_device, [tiles, tiles, self._rows, tokens])
        self._owners, self._ends, self.sources, self.outputs = parts
        tables = torch.zeros(tiles, width, dtype=torch.int32, device=device)
        self.pages = Pages(tables, torch.zeros(tiles, dtype=torch.int32, device=device), queries)

    def holds(self, cut: Cut) -> bool:
        return len(cut.owners) <= self._tiles

    def fill(self, cut: Cut, meta: AttentionMetadata, decode_rows: int) -> None:
        """Copy the ``cut`` of a step whose decodes are padded to ``decode_rows``."""
        self._staged.reverse()
        host, count = self._staged[0].numpy(), len(cut.owners)
        host[:] = 0
        host[:count], host[self._tiles : self._tiles + count] = cut.owners, cut.ends
        host[2 * self._tiles :][: len(cut.sources)] = cut.sources
        outputs = host[2 * self._tiles + self._rows :]
        outputs[: meta.num_decodes] = np.arange(meta.num_decodes)
        outputs[meta.num_decodes :][: len(cut.places)] = decode_rows + cut.places
        self._on_device.copy_(self._staged[0], non_blocking=True)
        self.pages.lengths.copy_(self._ends)
        width = self.pages.block_tables.shape[1]
        self.pages.block_tables.copy_(meta.block_tables[:, :width].index_select(0, self._owners))


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """The plan of one step. The tiles are computed once for every number of queries that layers use."""

    metadata: AttentionMetadata
    decodes: Pages | None
    tiles: dict[int, Tiles] = field(default_factory=dict)


class TiledBackend(PagedBackend[TiledPlan]):
    """An attention backend whose sequences and tables are padded to buckets.

    Graphs need fixed shapes, and the kernel is compiled for each width and number of splits. Padding has no tokens and
    reads none. ``attention`` computes the result: SplitK, or a class with the same methods.
    """

    device_type = "cuda"
    capturable = True
    attention: ClassVar[Any]

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._attend = self.attention(limits.block_size)

    def compile_all(self, layers: Sequence[tuple[AttentionSpec, Tensor]], dtype: torch.dtype) -> None:
        """Compile every kernel that steps may need, by calls with sequences without tokens."""
        found: dict[AttentionSpec, Tensor] = {spec.kind: kv for spec, kv in layers}
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
            # The merging kernel uses more warps for few sequences, and other strides for one sequence.
            key = spec, queries, width, choice, count * spec.num_heads < _FEW, count == 1
            if key not in seen:
                seen.add(key)
                pages = self._empty_pages(count, width, queries, kv.device)
                keys, values = kv.flatten(1, 2).unbind(0)
                q = torch.zeros(count * queries, spec.num_heads, spec.head_dim, dtype=dtype, device=kv.device)
                self._attend(q, keys, values, pages, spec)

    def _most_tiles(self, spec: AttentionSpec) -> int:
        """The maximum number of tiles of a step's prompts. Each prompt may have one partial tile."""
        return self._limits.max_num_tokens // queries_per_tile(spec) + self._limits.max_num_seqs

    def _empty_pages(self, count: int, width: int, queries: int, device: torch.device) -> Pages:
        longest = self._limits.max_blocks if queries == 1 else width
        tables = torch.zeros(count, longest, dtype=torch.int32, device=device)
        return Pages(tables[:, :width], torch.zeros(count, dtype=torch.int32, device=device), queries)

    def prepare(self, metadata: AttentionMetadata) -> TiledPlan:
        count = metadata.num_decodes
        if not count:
            return TiledPlan(metadata, None)
        width = table_width(int(metadata.seq_lens_host[:count].max()), self._limits)
        lengths = F.pad(metadata.seq_lens[:count], (0, bucket(count) - count))
        return TiledPlan(metadata, Pages(metadata.block_tables[:count, :width], lengths, 1))

    def plan_in_place(
        self, tokens: int, width: int, specs: Sequence[AttentionSpec], scratch_slot: int, device: torch.device
    ) -> TiledPlan:
        decodes = min(tokens, bucket(self._limits.max_num_seqs))
        tables = torch.zeros(decodes, width, dtype=torch.int32, device=device)
        pages = Pages(tables, torch.zeros(decodes, dtype=torch.int32, device=device), 1)
        tiles = {
            queries: Tiles(bucket(-(-tokens // queries) + _MORE_TILES), queries, tokens, width, device)
            for queries in sorted({queries_per_tile(spec) for spec in specs})
        }
        slots = torch.full((tokens,), scratch_slot, dtype=torch.int64, device=device)
        nothing = np.zeros(1, np.int32)
        return TiledPlan(AttentionMetadata(0, slots, tables, pages.lengths, slots, nothing, nothing), pages, tiles)

    def refill(self, plan: TiledPlan, metadata: AttentionMetadata, scratch_slot: int) -> bool:
        cuts = {queries: Cut.of(metadata, queries) for queries in plan.tiles}
        if plan.decodes is None or not all(plan.tiles[queries].holds(cut) for queries, cut in cuts.items()):
            return False
        count, slots, pages = metadata.num_decodes, plan.metadata.slot_mapping, plan.decodes
        slots[: len(metadata.slot_mapping)] = metadata.slot_mapping
        slots[len(metadata.slot_mapping) :].fill_(scratch_slot)
        pages.block_tables[:count] = metadata.block_tables[:count, : pages.block_tables.shape[1]]
        pages.lengths[:count] = metadata.seq_lens[:count]
        pages.lengths[count:].fill_(0)
        for queries, cut in cuts.items():
            plan.tiles[queries].fill(cut, metadata, len(pages.lengths))
        return True

    def places(self, kv: Tensor, plan: TiledPlan, layer: AttentionSpec) -> KVPlaces:
        return kv_places(kv, plan.metadata, layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: TiledPlan, layer: AttentionSpec) -> Tensor:
        kv_places(kv, plan.metadata, layer).write(k, v)
        return self.attend(q, kv, plan, layer)

    def attend(self, q: Tensor, kv: Tensor, plan: TiledPlan, layer: AttentionSpec) -> Tensor:
        keys, values = kv.flatten(1, 2).unbind(0)
        parts: list[Tensor] = []
        meta = plan.metadata
        if plan.decodes is not None:
            parts.append(self._attend(_padded(q, len(plan.decodes.lengths)), keys, values, plan.decodes, layer))
        if meta.num_decodes == len(meta.seq_lens_host):
            return parts[0][: meta.num_decodes]
        tiles = self._tiles(plan, queries_per_tile(layer))
        parts.append(self._attend(q.index_select(0, tiles.sources), keys, values, tiles.pages, layer))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, tiles.outputs)

    def _tiles(self, plan: TiledPlan, queries: int) -> Tiles:
        if queries not in plan.tiles:
            meta, cut = plan.metadata, Cut.of(plan.metadata, queries)
            width = table_width(int(meta.seq_lens_host[meta.num_decodes :].max()), self._limits)
            device = meta.block_tables.device
            tiles = Tiles(bucket(len(cut.owners)), queries, len(meta.slot_mapping), width, device)
            tiles.fill(cut, meta, 0 if plan.decodes is None else len(plan.decodes.lengths))
            plan.tiles[queries] = tiles
        return plan.tiles[queries]


def _padded(q: Tensor, count: int) -> Tensor:
    """The first ``count`` rows of ``q``, padded with zeros."""
    return q[:count] if len(q) >= count else F.pad(q, (0, 0, 0, 0, 0, count - len(q)))

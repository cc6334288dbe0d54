"""Paged attention with RayLM's kernels, the first choice on GPUs.

They serve windows, soft capping, heads of 80 or 96 and fp8 too, which xformers lacks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from raylm.models import FP8, AttentionSpec
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import CAPABILITY, Pages, Tile, num_splits, processors, tile_of
from raylm.worker.gpu.tiled import TiledBackend

_WIDEST_HEAD = 256


class PagedAttention:
    """As SplitK: attention over pages, with paged_kernels.py."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        """``q`` (B * queries, num_heads, head_dim), ``keys`` and ``values`` (slots, num_kv_heads, head_dim) -> as q."""
        import triton

        from raylm.models import early
        from raylm.worker.gpu import paged_kernels

        tables, count, group = pages.block_tables, len(pages.lengths), spec.num_heads // spec.num_kv_heads
        splits, tile = self.choice(count, tables.shape[1], pages.queries, spec, q.device)
        num_rows, width = count * pages.queries * spec.num_heads, triton.next_power_of_2(spec.head_dim)
        out = torch.empty_like(q)
        parts, sums = out, out
        if splits > 1:
            parts = q.new_empty(splits, num_rows, spec.head_dim, dtype=torch.float32)
            sums = q.new_empty(splits, num_rows, dtype=torch.float32)
        grid = -(-pages.queries * group // tile.rows), count * spec.num_kv_heads, splits
        paged_kernels.attend[grid](
            q, keys, values, tables, pages.lengths, parts, sums,
            spec.scale * spec.key_scale, spec.value_scale, spec.softcap or 0.0, spec.sliding_window or 0, pages.queries,
            group, spec.num_kv_heads, spec.head_dim, tables.stride(0), num_rows,
            HAS_SOFTCAP=spec.softcap is not None, HAS_WINDOW=spec.sliding_window is not None, SPLITS=splits,
            ROWS=tile.rows, KEYS=tile.keys, BLOCK=self._block_size, DIM=width,
            num_warps=tile.warps, num_stages=tile.stages, **early(q.device),
        )  # fmt: skip
        if splits > 1:
            paged_kernels.merge[num_rows,](
                parts, sums, out, num_rows, spec.head_dim, SPLITS=splits, DIM=width, **early(q.device)
            )
        return out

    def choice(
        self, count: int, width: int, queries: int, spec: AttentionSpec, device: torch.device
    ) -> tuple[int, Tile]:
        """The splits and the tile for ``count`` sequences with tables of ``width`` blocks."""
        rows, tokens = queries * (spec.num_heads // spec.num_kv_heads), width * self._block_size
        if spec.sliding_window is not None:
            tokens = min(tokens, spec.sliding_window + queries)
        major = torch.cuda.get_device_capability(device)[0]
        tile = self.tile(rows, 1 << (spec.head_dim - 1).bit_length(), major)
        programs = count * spec.num_kv_heads * -(-rows // tile.rows)
        return num_splits(programs, tokens, processors(device)), tile

    def tile(self, rows: int, width: int, major: int) -> Tile:
        return tile_of(rows, width, self._block_size, major)


class Fp8PagedAttention(PagedAttention):
    """For fp8 keys and values. They are converted in registers, which hold only half the keys of the widest heads."""

    def tile(self, rows: int, width: int, major: int) -> Tile:
        tile = super().tile(rows, width, major)
        return replace(tile, keys=min(tile.keys, 32)) if width == _WIDEST_HEAD else tile


class TritonBackend(TiledBackend):
    """Sequences and their tables are padded to buckets, as in TiledBackend."""

    name = "triton"
    attention = PagedAttention
    capability: ClassVar[tuple[int, int]] = CAPABILITY

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        if device.type != "cuda":
            return ["it computes on NVIDIA GPUs only"]
        reasons = refusals(dtype, device, cls.capability)
        if not 16 <= spec.head_dim <= _WIDEST_HEAD:
            reasons.append(f"it has no head_dim {spec.head_dim}, only 16 to {_WIDEST_HEAD}")
        if block_size % 16 or block_size & (block_size - 1):
            reasons.append(f"it has no blocks of {block_size} tokens, only 16, 32, 64, ..")
        if not reasons and (wrong := probe(cls, spec.kind, dtype, device, block_size)):
            reasons.append(wrong)
        return reasons


class Fp8TritonBackend(TritonBackend):
    """With keys and values in fp8 (e4m3). Needs a GPU with an instruction for the conversion."""

    name = "triton-fp8"
    attention = Fp8PagedAttention
    kv_dtype = FP8
    capability = (8, 9)


def refusals(dtype: torch.dtype, device: torch.device, capability: tuple[int, int]) -> list[str]:
    """Reasons why the kernels cannot run on ``device``; empty if they can."""
    reasons = [] if dtype in (torch.float16, torch.bfloat16) else [f"it has no {dtype}"]
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        reasons.append("it needs triton, and none is installed (pip install 'raylm[gpu]')")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < capability:
        reasons.append(f"it needs a GPU of compute capability {'{}.{}'.format(*capability)}, and this one has {found}")
    return reasons

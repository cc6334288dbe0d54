"""SplitK: xformers' split-k operator over pages of keys and values. Only this module uses xformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor

from raylm.models import AttentionSpec

XFORMERS = "0.0.35"
HEAD_DIMS = frozenset({16, 32, 64, 128, 256, 512})

_BLOCK_POINTERS_UNTIL = (3, 9)
CAPABILITY = (8, 0)
_MOST_SPLITS = 64
_TOKENS_A_SPLIT = 64
# Default without a GPU, for example in Triton's interpreter: the number of an A100.
_PROCESSORS = 108
_ROWS = 128  # queries times heads that one program holds against the keys it reads
_LEAST_QUERIES = 16
_WIDE_HEAD = 128  # for wider heads, registers and shared memory cannot hold 128 rows
_WIDEST_HEAD = 256  # for wider heads, they cannot hold 64 keys and 16 rows
_HOPPER, _BLACKWELL = 9, 10  # their matrix products read shared memory; those of other GPUs read registers


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program: ``rows`` of queries against ``keys``, with so many ``warps``.

    It loads keys ``stages`` tiles ahead. With one stage no load is asynchronous.
    """

    rows: int
    keys: int
    warps: int
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of B sequences. Each has the same number of ``queries``, its last tokens.

    ``block_tables`` (up to B, width) int32 and ``lengths`` (B,) int32 are on the device. A sequence of length 0 reads
    nothing, needs no table, and gets zeros.
    """

    block_tables: Tensor
    lengths: Tensor
    queries: int


class SplitK:
    """Attention over pages by xformers' ``triton_splitk``, its only operator for pages that runs on every GPU.

    A program holds the rows of one key-value head: its queries times the query heads that share it. It iterates over
    the keys of one sequence, or over one of several splits of them. A second kernel merges the splits. Splits occupy
    the GPU when there are few sequences. The operator is named explicitly, because xformers' dispatch would choose
    others. Its own number of splits depends only on the sequences: for 64 sequences with long tables it uses 64 splits,
    and half a GiB for their results.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        """``q`` (B * queries, num_heads, head_dim), ``keys`` and ``values`` (slots, num_kv_heads, head_dim) -> as q.

        Causal: the last query of a sequence attends to all its tokens. Slots beyond a sequence's length are not read.
        """
        from xformers.ops.fmha.common import Inputs

        shape = (1, -1, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        spread = (1, len(keys), *shape[2:])
        inputs = Inputs(
            q.view(shape),
            keys[None, :, :, None].expand(spread),
            values[None, :, :, None].expand(spread),
            attn_bias=_bias(pages, self._block_size),
            scale=spec.scale,
        )
        out: Tensor = self._operator(pages, spec, q.device).apply(inputs, needs_gradient=False)[0]
        return out.reshape(q.shape)

    def _operator(self, pages: Pages, spec: AttentionSpec, device: torch.device) -> Any:
        return operator(*self.choice(len(pages.lengths), pages.block_tables.shape[1], pages.queries, spec, device))

    def choice(
        self, count: int, width: int, queries: int, spec: AttentionSpec, device: torch.device
    ) -> tuple[int, Tile]:
        """The splits and the tile for ``count`` sequences with tables of ``width`` blocks."""
        rows = queries * (spec.num_heads // spec.num_kv_heads)
        tile = tile_of(rows, spec.head_dim, self._block_size, torch.cuda.get_device_capability(device)[0])
        programs = count * spec.num_kv_heads * -(-rows // tile.rows)
        return num_splits(programs, width * self._block_size, processors(device)), tile


def tile_of(rows: int, head_dim: int, block_size: int, major: int) -> Tile:
    """The tile for ``rows`` against each key-value head, on a GPU of compute capability ``major``.x.

    Found by compiling ahead of time for each architecture (tests/worker/gpu/compiled_kernels.py): the largest tile that
    fits in shared memory and spills no registers.
    """
    if head_dim > _WIDEST_HEAD:
        return Tile(16, 16, 4)
    if head_dim > _WIDE_HEAD:
        return Tile(16, block_size, 4) if rows <= 16 else Tile(32, min(32, block_size), 4)
    held = min(_ROWS, max(16, 1 << (rows - 1).bit_length()))
    crowded = held == _ROWS and head_dim == _WIDE_HEAD and major not in (_HOPPER, _BLACKWELL)
    return Tile(held, min(32 if crowded else 64, block_size), 8 if held == _ROWS else 4)


class SharedKernel:
    """xformers' kernel, shared for all numbers of sequences. It is compiled for each number, but does not use it."""

    _UNUSED: ClassVar[dict[str, int]] = {"Z": 1, "N_CTX_K": 1, "kv_cache_blocks_per_row": 1}

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]
        return lambda **arguments: launch(**(arguments | self._UNUSED))


@lru_cache
def operator(splits: int, tile: Tile) -> Any:
    """xformers' operator with our tile. Its own tile, of 128 rows for head_dim 128, spills registers."""
    from xformers.ops.fmha.triton_splitk import FwOp

    chosen = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}

    kernel = SharedKernel(FwOp.get_kernel())

    class Operator(FwOp):  # type: ignore[misc]  # xformers has no types
        SPLIT_K = splits

        @classmethod
        def get_kernel(cls) -> SharedKernel:
            return kernel

        @classmethod
        def get_extra_args(cls, **shapes: Any) -> dict[str, int]:
            return chosen

    return Operator


def refusals(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Reasons why the operator cannot run on ``device``; empty if it can."""
    reasons = []
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it has no {dtype}")
    found = _version("xformers")
    if found != XFORMERS:
        reasons.append(f"it needs xformers {XFORMERS}, and {found or 'none'} is installed (pip install 'raylm[gpu]')")
    triton = _version("triton")
    if triton is None or tuple(map(int, triton.split(".")[:2])) >= _BLOCK_POINTERS_UNTIL:
        reasons.append(f"it needs triton before 3.9, and {triton or 'none'} is installed (pip install 'raylm[gpu]')")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        reasons.append(f"it needs a GPU of compute capability 8.0 (Ampere), and this one has {capability}")
    return reasons


def queries_per_tile(spec: AttentionSpec) -> int:
    """The number of queries in one pseudo-sequence of a prompt, chosen to fill a program's rows."""
    if spec.head_dim > _WIDE_HEAD:
        return _LEAST_QUERIES
    each = _ROWS * spec.num_kv_heads // spec.num_heads
    return max(_LEAST_QUERIES, 1 << each.bit_length() - 1) if each else _LEAST_QUERIES


def num_splits(programs: int, tokens: int, processors: int) -> int:
    """The number of splits, a power of two: enough to occupy the GPU twice, each of at least 64 tokens."""
    splits = 1
    while 2 * splits <= min(_MOST_SPLITS, tokens // _TOKENS_A_SPLIT) and splits * programs < 2 * processors:
        splits *= 2
    return splits


@lru_cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _bias(pages: Pages, block_size: int) -> Any:
    """The attention mask as xformers' object. The operator reads only the non-zero fields."""
    from xformers.ops.fmha import attn_bias

    count, longest = len(pages.lengths), pages.block_tables.shape[1] * block_size
    lengths, each, zeros = pages.lengths, pages.queries, [0] * count
    queries = attn_bias._SeqLenInfo(seqstart=lengths, max_seqlen=each, min_seqlen=each, seqstart_py=[0, count * each])
    keys = attn_bias._PaddedSeqLenInfo(
        seqstart=lengths, max_seqlen=longest, min_seqlen=0, seqstart_py=[*zeros, 0], seqlen=lengths, seqlen_py=zeros,
        padding=longest,
    )  # fmt: skip
    return attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(queries, keys, pages.block_tables, block_size)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

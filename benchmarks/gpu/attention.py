"""Attention kernels alone: RayLM's and xformers' over pages, with their tiles, and torch's over contiguous tensors.

    python -m benchmarks.gpu.attention --out results                  # the tiles that RayLM chooses
    python -m benchmarks.gpu.attention --out results --sweep          # all tiles; the fastest five of each kernel
    python -m benchmarks.gpu.attention --sweep --compile 3 16         # compiles the fourth of sixteen parts

A decode is ``batch`` sequences with one query each. A prompt is one sequence of ``context`` queries. Each call reads
other keys and values, which are together larger than the GPU's cache. Calls are timed as replays of a CUDA graph.

us      microseconds of a call
share   of a decode: the ideal time to read the keys and values at the bandwidth of a copy, divided by the measured
        time. Of a prompt: its operations per second, divided by those of a large product.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.__main__ import Results
from benchmarks.gpu.device import bandwidth, gemm_peak, replayed
from raylm.models import AttentionSpec
from raylm.worker.gpu.split_k import Pages, SplitK, Tile, queries_per_tile
from raylm.worker.gpu.triton_attention import PagedAttention

_BLOCK = 64
_MORE_THAN_CACHE = 200 << 20  # bytes
_CALLS = 48
KERNELS = {"xformers": SplitK, "raylm": PagedAttention}


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``context`` tokens that decode, or one prompt of ``context`` tokens."""

    batch: int
    context: int
    is_prompt: bool = False


CASES = [
    Case(1, 256),
    Case(1, 2048),
    Case(1, 8192),
    Case(64, 256),
    Case(64, 2048),
    Case(1, 2048, is_prompt=True),
    Case(1, 8192, is_prompt=True),
]


class Setting:
    """The inputs of a case: several pools, and queries."""

    def __init__(self, case: Case, spec: AttentionSpec, most: int = _CALLS) -> None:
        self.case, self.spec = case, spec
        blocks = case.batch * -(-case.context // _BLOCK)
        shape = (2, blocks * _BLOCK, spec.num_kv_heads, spec.head_dim)
        each = 4 * blocks * _BLOCK * spec.num_kv_heads * spec.head_dim
        self.bytes = 4 * case.batch * case.context * spec.num_kv_heads * spec.head_dim
        self.operations = 2 * spec.num_heads * spec.head_dim * case.context**2
        count = min(most, max(4, _MORE_THAN_CACHE // each))
        self.pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self.queries = queries_per_tile(spec) if case.is_prompt else 1
        tiles = case.context // self.queries if case.is_prompt else case.batch
        self.q = torch.randn(tiles * self.queries, spec.num_heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
        tables = torch.arange(blocks, dtype=torch.int32, device="cuda")
        if case.is_prompt:
            ends = torch.arange(1, tiles + 1, dtype=torch.int32, device="cuda") * self.queries
            self.pages = Pages(tables.expand(tiles, -1).contiguous(), ends, self.queries)
        else:
            full = torch.full((tiles,), case.context, dtype=torch.int32, device="cuda")
            self.pages = Pages(tables.view(case.batch, -1), full, 1)

    def seconds(self, run: Callable[[Tensor, Tensor], object]) -> float:
        """Seconds of a call of ``run`` with keys and values, replayed in a graph over all pools."""
        return replayed(lambda pool: run(*pool), self.pools)


def forced(kind: type[Any], splits: int, tile: Tile) -> Any:
    """``kind`` with fixed splits and a fixed tile."""

    class Forced(kind):  # type: ignore[misc]
        def choice(self, *shape: Any) -> tuple[int, Tile]:
            return splits, tile

    return Forced(_BLOCK)


def configurations(case: Case) -> Iterator[tuple[str, int, Tile]]:
    if case.is_prompt:
        shapes = itertools.product((64, 128), (32, 64), (4, 8), (2, 3))
        for rows, keys, warps, stages in shapes:
            for kernel in KERNELS:
                yield kernel, 1, Tile(rows, keys, warps, stages)
        return
    splits = (
        [1, 2] if case.batch > 1 else [count for count in (1, 2, 4, 8, 16, 32) if 64 <= case.context / count <= 512]
    )
    for count, keys, warps, stages in itertools.product(splits, (32, 64), (1, 2, 4), (2, 3)):
        for kernel in KERNELS:
            yield kernel, count, Tile(16, keys, warps, stages)


def by_torch(setting: Setting) -> Iterator[tuple[str, Callable[[Tensor, Tensor], object]]]:
    """torch's attention over contiguous keys and values of the same sizes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case, spec = setting.case, setting.spec
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def run(keys: Tensor, values: Tensor, backend: Any = backend) -> Tensor:
            q = setting.q.view(case.batch, -1, spec.num_heads, spec.head_dim).transpose(1, 2)
            k, v = (each.view(case.batch, -1, *each.shape[1:]).transpose(1, 2) for each in (keys, values))
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=case.is_prompt, enable_gqa=True)

        yield name, run


def row_of(setting: Setting, kernel: str, taken: float, peaks: dict[str, float], **about: Any) -> dict[str, Any]:
    case = setting.case
    share = setting.operations / peaks["gemm"] if case.is_prompt else setting.bytes / peaks["bandwidth"]
    return {"kernel": kernel} | asdict(case) | about | {"us": 1e6 * taken, "share": share / taken}


def measure(case: Case, spec: AttentionSpec, peaks: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    setting = Setting(case, spec)
    tiles = len(setting.pages.lengths)
    chosen = {
        name: kind(_BLOCK).choice(tiles, setting.pages.block_tables.shape[1], setting.queries, spec, setting.q.device)
        for name, kind in KERNELS.items()
    }
    for name, run in by_torch(setting):
        try:
            yield row_of(setting, name, setting.seconds(run), peaks)
        except RuntimeError as error:
            yield {"kernel": name} | asdict(case) | {"left_out": str(error)[:100]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in KERNELS}
    tried = configurations(case) if sweep else iter(())
    for name, splits, tile in itertools.chain(((name, *choice) for name, choice in chosen.items()), tried):
        attend = forced(KERNELS[name], splits, tile)

        def run(keys: Tensor, values: Tensor, attend: Any = attend) -> object:
            return attend(setting.q, keys, values, setting.pages, spec)

        about = {"splits": splits} | asdict(tile) | {"chosen": (splits, tile) == chosen[name]}
        try:
            found[name].append(row_of(setting, name, setting.seconds(run), peaks, **about))
        except Exception as error:
            found[name].append({"kernel": name} | about | {"left_out": str(error)[:100], "us": float("inf")})
    for rows in found.values():
        yield rows[0]
        yield from sorted(rows[1:], key=lambda row: row["us"])[:5]


def compile_part(part: int, parts: int, spec: AttentionSpec) -> None:
    for case in CASES:
        setting = Setting(case, spec, 1)
        for name, splits, tile in list(configurations(case))[part::parts]:
            try:
                forced(KERNELS[name], splits, tile)(setting.q, *setting.pools[0], setting.pages, spec)
            except Exception as error:
                print(name, splits, tile, str(error)[:100])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("PART", "PARTS"))
    parser.add_argument("--out", type=Path, metavar="DIR")
    args = parser.parse_args()
    spec = AttentionSpec(0, *args.heads, args.heads[2] ** -0.5)
    if args.compile:
        compile_part(*args.compile, spec)
        return
    results = Results(args.out, "attention.jsonl")
    device = torch.device("cuda")
    peaks = {"bandwidth": bandwidth(device), "gemm": gemm_peak(device)}
    results.add({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": args.heads} | peaks)
    for case in CASES:
        for row in measure(case, spec, peaks, sweep=args.sweep):
            results.add(row)


if __name__ == "__main__":
    main()

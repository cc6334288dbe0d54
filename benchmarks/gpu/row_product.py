"""The product of one row with weights of a decoder, by torch and by RayLM's kernel with several tiles.

    python -m benchmarks.gpu.row_product --out results

Each call reads other weights, which are together larger than the GPU's cache. The calls are replayed in a CUDA graph,
each after a norm, as in a decoder. ``share`` is the ideal time to read the weights at the bandwidth of a copy, divided
by the measured time.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.__main__ import Results
from benchmarks.gpu.device import bandwidth, replayed
from raylm.models.gpu.elementwise import TritonElementwise
from raylm.models.gpu.row_product import TILE, RowTile, multiply_row

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TILES = [RowTile(*each) for each in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (2, 4, 8))]
_BYTES = 1 << 30


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, nargs=2, metavar=("PART", "PARTS"))
    parser.add_argument("--out", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.compile:
        part, parts = args.compile
        for tile in TILES[part::parts]:
            for outputs, inputs in SHAPES.values():
                multiply_row(*(torch.zeros(n, inputs, device="cuda").bfloat16() for n in (1, outputs)), None, tile)
        return
    results, elementwise = Results(args.out, "row_product.jsonl"), TritonElementwise()
    peak = bandwidth(torch.device("cuda"))
    results.add({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": peak})
    sums: dict[RowTile | None, float] = {}
    for name, (outputs, inputs) in SHAPES.items():
        count = _BYTES // (2 * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(count)]
        x, scale = torch.randn(1, inputs, device="cuda").bfloat16(), torch.ones(inputs, device="cuda").bfloat16()

        def normed(x: Tensor = x, scale: Tensor = scale) -> Tensor:
            return elementwise.add_rms_norm(x, None, scale, 1e-5)[1]

        alone = replayed(lambda weight: normed(), weights)
        rows = []
        for tile in [None, *TILES]:

            def run(weight: Tensor, tile: RowTile | None = tile) -> Tensor:
                row = normed()
                return functional.linear(row, weight) if tile is None else multiply_row(row, weight, None, tile)

            taken = replayed(run, weights)
            sums[tile] = sums.get(tile, 0.0) + taken
            about = {} if tile is None else asdict(tile)
            row = {"product": name, "kernel": "torch" if tile is None else "raylm"} | about
            share = 2 * outputs * inputs / peak / (taken - alone)
            rows.append(row | {"us": 1e6 * taken, "norm_us": 1e6 * alone, "share": share, "chosen": tile == TILE})
        for row in [rows[0], *sorted(rows[1:], key=lambda row: row["us"])[:5]]:
            results.add(row)
        del weights
    for tile, taken in sorted(sums.items(), key=lambda each: each[1])[:8]:
        results.add({"sum_of": "all", "us": 1e6 * taken} | ({} if tile is None else asdict(tile)))
    results.add({"sum_of": "torch", "us": 1e6 * sums[None]})


if __name__ == "__main__":
    main()

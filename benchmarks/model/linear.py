"""Milliseconds of one linear layer by the format of its weight: bfloat16, int8, int4 without and with zeros.

int8 has one scale for each row, as in W8A8 checkpoints, or for each 64 inputs, as with `quantization: int8`.

    python -m benchmarks.model.linear --threads 4 [--inputs 4096] [--outputs 6144] [--rows 2 8 32 256]

Each format has enough copies of its layer to fill --mib, which should be more than the caches hold. Calls use the
copies in turn, and the formats alternate. Figures are the least time of --repeats, and the speedup over bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.rows import Report, parser
from raylm.models.quantization.formats import round_int8
from raylm.native import Int4Weight, NativeLinear, Weight, kernels, round_int4, use_threads


def formats(group: int) -> dict[str, Callable[[Tensor], Weight]]:
    """Functions that convert a bfloat16 weight to each format, the baseline first."""

    def without_zeros(weight: Tensor) -> Int4Weight:
        found = round_int4(kernels(), weight, group)
        return Int4Weight(found.values, found.scales)

    return {
        "bfloat16": lambda weight: weight,
        "int8": round_int8,
        "int8, groups of 64": lambda weight: round_int8(weight, 64),
        f"int4, groups of {group}": without_zeros,
        f"int4 with zeros, groups of {group}": lambda weight: round_int4(kernels(), weight, group),
    }


def copies(weight: Weight, size: int) -> list[NativeLinear]:
    """Layers with the same values in separate memory, ``size`` bytes in total."""
    return [NativeLinear(kernels(), weight, None) for _ in range(-(-size // weight.nbytes))]


def best(layers: dict[str, list[NativeLinear]], x: Tensor, repeats: int, calls: int) -> dict[str, float]:
    """The least seconds per call, by format."""
    found = dict.fromkeys(layers, float("inf"))
    turns = {name: cycle(copies) for name, copies in layers.items()}
    for _ in range(repeats):
        for name, turn in turns.items():
            started = time.perf_counter()
            for _ in range(calls):
                next(turn)(x)
            found[name] = min(found[name], (time.perf_counter() - started) / calls)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=4)
    options.add_argument("--inputs", type=int, default=4096)
    options.add_argument("--outputs", type=int, default=6144)
    options.add_argument("--group", type=int, default=32)
    options.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32, 256])
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--calls", type=int, default=20, help="of one format in a row")
    options.add_argument("--mib", type=int, default=256, help="of all copies of one format")
    args = options.parse_args()
    torch.set_num_threads(1)  # torch only packs the weights; its idle threads would take cores from the kernels
    use_threads(args.threads)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(args.outputs, args.inputs, generator=draw).mul_(0.02).bfloat16()
    layers = {name: copies(make(weight), args.mib << 20) for name, make in formats(args.group).items()}
    report = Report("linear", {"time": "ms", "ratio": "x", "rate": "TFLOP/s"}, args.out)
    for rows in args.rows:
        x = torch.randn(rows, args.inputs, generator=draw).bfloat16()
        found = best(layers, x, args.repeats, args.calls)
        for name, seconds in found.items():
            rate = 2 * rows * args.inputs * args.outputs / seconds / 1e12
            figures = {"time": 1e3 * seconds, "ratio": found["bfloat16"] / seconds, "rate": rate}
            report.add(f"{rows} rows, {name}", figures)


if __name__ == "__main__":
    main()

"""Milliseconds of one linear layer by the format of its weight: bfloat16, int8, int4 without and with zeros.

    python benchmarks/linear.py --threads 4 [--inputs 4096] [--outputs 6144] [--rows 2 8 32 256]

Each format has as many copies of its layer as fill --mib, which should be more than the caches hold, and is run over
them in turn; the formats take turns too. Told is the least of --repeats, and how many times as fast as bfloat16 it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from raylm.models.quantization.formats import round_int8
from raylm.native import Int4Weight, NativeLinear, Weight, kernels, round_int4, use_threads


def formats(group: int) -> dict[str, Callable[[Tensor], Weight]]:
    """How a bfloat16 weight becomes each of them, the one they are compared to first."""

    def without_zeros(weight: Tensor) -> Int4Weight:
        found = round_int4(kernels(), weight, group)
        return Int4Weight(found.values, found.scales)

    return {
        "bfloat16": lambda weight: weight,
        "int8": round_int8,
        f"int4, groups of {group}": without_zeros,
        "the same with zeros": lambda weight: round_int4(kernels(), weight, group),
    }


def copies(weight: Weight, size: int) -> list[NativeLinear]:
    """Layers of the same values, each in memory of its own, ``size`` bytes in all."""
    return [NativeLinear(kernels(), weight, None) for _ in range(-(-size // weight.nbytes))]


def best(layers: dict[str, list[NativeLinear]], x: Tensor, repeats: int, calls: int) -> dict[str, float]:
    """The least seconds of a call by format."""
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="of one format in a row")
    parser.add_argument("--mib", type=int, default=256, help="of all copies of one format")
    a = parser.parse_args()
    torch.set_num_threads(1)  # it only packs; its waiting threads would take cores from the kernels
    use_threads(a.threads)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(a.outputs, a.inputs, generator=draw).mul_(0.02).bfloat16()
    layers = {name: copies(make(weight), a.mib << 20) for name, make in formats(a.group).items()}
    print(f"{'rows':>6}" + "".join(f"{name:>26}" for name in layers))
    for rows in a.rows:
        x = torch.randn(rows, a.inputs, generator=draw).bfloat16()
        found = best(layers, x, a.repeats, a.calls)
        plain = found["bfloat16"]
        shown = (f"{1e3 * s:.2f} ms, {plain / s:.2f}x" for s in found.values())
        operations = 2 * rows * a.inputs * a.outputs / plain / 1e12
        print(f"{rows:6}" + "".join(f"{text:>26}" for text in shown) + f"   {operations:.2f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()

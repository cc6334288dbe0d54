"""Alternatives for rounding: group sizes, with or without zeros, with or without searched bounds, and the head's bits.

    python -m benchmarks.model.quantization_choices [--rows 32] [--threads 2]

The embedded model in bfloat16 reads the conversations of quantization.py. Prints the root mean square of the logits'
error and the divergence from float32, for the alternatives and for the formats of `quantization`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.model.quantization import UNITS, conversations, errors, run
from benchmarks.rows import Report, parser
from raylm.checkpoint import resolve
from raylm.models.linear import PLAIN, Linear, WeightFormat
from raylm.models.quantization import select as quantization
from raylm.models.quantization.formats import RoundedInt4, RoundedInt8
from raylm.native import Int4Weight, Weight, kernels, round_int4

_SHARES = torch.linspace(1.0, 0.5, 26)
_MIDDLE = 8


@dataclass(frozen=True)
class Int4Choice(WeightFormat):
    """Rounding to 4 bits in groups of ``group`` inputs. Without ``zeros``, 0 is always in the middle of the range."""

    group: int
    zeros: bool = True
    search: bool = True

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        return {}

    def weight(self, layer: Linear) -> Weight:
        assert layer.weight is not None
        if self.zeros and self.search:
            return round_int4(kernels(), layer.weight.data, self.group)
        grouped = layer.weight.data.float().unflatten(1, (-1, self.group))
        return _between_bounds(grouped) if self.zeros else _around_zero(grouped)


def _between_bounds(grouped: Tensor) -> Int4Weight:
    """Round (out, groups, group) to the nearest of 16 steps between the minimum and maximum of each group."""
    low, high = grouped.amin(2).clamp_(max=0), grouped.amax(2).clamp_(min=0)
    scales = (high - low).clamp_(min=1e-12) / 15
    zeros = (-low / scales).round_()
    values = (grouped / scales[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return Int4Weight(values.to(torch.uint8).flatten(1), scales, zeros)


def _around_zero(grouped: Tensor) -> Int4Weight:
    """As ``_between_bounds``, with bounds symmetric around 0 and reduced by the factor with the least error."""
    largest, least_error = grouped.abs().amax(2).clamp_(min=1e-12), torch.tensor(float("inf"))
    values, scales = torch.empty_like(grouped), torch.empty_like(largest)
    for share in _SHARES:
        scale = share * largest / (_MIDDLE - 0.5)
        steps = (grouped / scale[..., None]).round_().clamp_(-_MIDDLE, _MIDDLE - 1)
        error = (steps * scale[..., None] - grouped).square_().sum(2)
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        values = torch.where(better[..., None], steps, values)
        scales = torch.where(better, scale, scales)
    return Int4Weight((values + _MIDDLE).to(torch.uint8).flatten(1), scales)


def choices() -> dict[str, tuple[WeightFormat, WeightFormat]]:
    """The formats of the layers and of the head, by name."""
    int4, int8 = RoundedInt4(), RoundedInt8()
    found: dict[str, tuple[WeightFormat, WeightFormat]] = {
        "int8, head rounded": (int8, int8),
        "int8, head plain": (int8, PLAIN),
    }
    for zeros in (True, False):
        for group in (32, 64, 128):
            choice = Int4Choice(group, zeros)
            found[f"int4, groups of {group}, {'with' if zeros else 'without'} zeros"] = choice, choice
    found |= {"int4, head int8": (int4, int8), "int4, head plain": (int4, PLAIN)}
    unsearched = Int4Choice(64, search=False)
    found["int4, groups of 64 with zeros, bounds not searched"] = unsearched, unsearched
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--length", type=int, default=640, help="tokens of a row")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = resolve("embedded")
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    rows = list(conversations(tokenizer, args.length, args.rows))
    exact, *_ = run(checkpoint, rows, "float32", None)
    report = Report("quantization_choices", UNITS, args.out)
    for name, (layers, head) in choices().items():
        quantization._ROUNDED[name] = name, layers, head  # registered for the configuration
        result, *_ = run(checkpoint, rows, "bfloat16", name)
        report.add(name, errors(result, exact))


if __name__ == "__main__":
    main()

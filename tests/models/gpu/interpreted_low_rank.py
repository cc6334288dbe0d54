"""LoRA adapters of many rows at once, in Triton's interpreter, equal one product after the other.

test_kernels.py runs this in float32 and float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raylm.models.gpu import low_rank
from raylm.models.gpu.low_rank import GroupedLowRank
from raylm.models.linear import Linear, dense
from raylm.models.lora import AdapterLimits, LowRank, LowRankLayers
from raylm.native import AdapterRun

CPU = torch.device("cpu")
LIMITS = AdapterLimits(64, 4, 20)
PARTS = {"qkv": {"q": 72, "k": 40, "v": 24}, "down": {"down": 66}}
INPUTS = 48


class Model(nn.Module):
    """Two linear layers with zero weights: one of three parts, and one of one part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, parts in PARTS.items():
            layer = Linear(INPUTS, parts, bias=False)
            layer.weight = nn.Parameter(torch.zeros(sum(parts.values()), INPUTS, dtype=dtype), requires_grad=False)
            layer.freeze(dense)
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [getattr(self, name)(x) for name in PARTS]


def adapter(seed: int, dtype: torch.dtype) -> dict[str, LowRank]:
    """An adapter for random parts, with a random rank for each."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for parts in PARTS.values():
        for name, rows in parts.items():
            if torch.rand((), generator=draw) < 0.7:
                rank = int(torch.randint(1, 21, (), generator=draw))
                down = torch.randn(rank, INPUTS, generator=draw) / INPUTS**0.5
                found[name] = LowRank(down.to(dtype), torch.randn(rows, rank, generator=draw) / rank**0.5)
    return found


def run(
    cls: type[LowRankLayers], steps: list[list[tuple[int, int, int]]], dtype: torch.dtype, rounded: torch.dtype
) -> list[Tensor]:
    """The outputs of all layers in steps of 25 rows, with ``rounded`` inputs. A step is (adapter, first row, rows)."""
    model: Any = Model(dtype)
    layers = cls(model, dtype, CPU, LIMITS)
    packed = [layers.pack(adapter(seed, rounded)) for seed in range(4)]
    found = []
    for seed, step in enumerate(steps):
        x = torch.randn(25, INPUTS, generator=torch.Generator().manual_seed(seed)).to(rounded).to(dtype)
        layers.begin([AdapterRun(packed[which], start, count) for which, start, count in step])
        found += [out.double() for out in model(x)]
    return found


STEPS = [
    [(0, 0, 1), (1, 1, 1), (2, 3, 2), (0, 6, 17)],  # an adapter twice, and rows without an adapter
    [],
    [(3, 0, 25)],
    [(3, 0, 25)],
]


@pytest.mark.parametrize(
    ("dtype", "bound", "few"),
    [
        (torch.float32, 1e-5, 512),
        pytest.param(torch.float32, 1e-5, 8, marks=pytest.mark.long),  # large tiles
        pytest.param(torch.float16, 4e-3, 512, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_many_adapters_at_once_are_those_one_by_one(
    dtype: torch.dtype, bound: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "_FEW", few)
    monkeypatch.setattr(low_rank, "_PIECE", 32)  # small, so that inputs are split
    reference = run(LowRankLayers, STEPS, torch.float32, dtype)
    for got, wanted in zip(run(GroupedLowRank, STEPS, dtype, dtype), reference, strict=True):
        assert float((got - wanted).abs().max()) <= bound * max(1.0, float(wanted.abs().max()))


@pytest.mark.long
def test_rows_in_the_wrong_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the rows of a step keep the order of the previous step."""
    begin = GroupedLowRank.begin

    def stale(self: GroupedLowRank, runs: list[AdapterRun]) -> None:
        order = self._device_side["order"].clone()
        begin(self, runs)
        self._device_side["order"].copy_(order)

    monkeypatch.setattr(GroupedLowRank, "begin", stale)
    with pytest.raises(AssertionError):
        test_many_adapters_at_once_are_those_one_by_one(torch.float32, 1e-5, 512, monkeypatch)


@pytest.mark.long
def test_what_is_held_has_no_adapter() -> None:
    model: Any = Model(torch.float32)
    layers = GroupedLowRank(model, torch.float32, CPU, LIMITS)
    run = AdapterRun(layers.pack(adapter(0, torch.float32)), 0, 9)
    x = torch.ones(9, INPUTS)
    layers.begin([run])
    assert all(bool(out.any()) for out in model(x))
    layers.hold(adapted=True)
    assert not any(bool(out.any()) for out in model(x))
    layers.begin([run])
    assert all(bool(out.any()) for out in model(x))

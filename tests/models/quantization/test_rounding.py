"""Rounding errors stay within the steps' bounds, and 4-bit groups use the best of the bounds that are tried."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raylm.models.quantization.formats import group_of, round_int8
from raylm.native import Int4Weight, kernels, round_int4
from raylm.native.build import INSTRUCTION_SETS, offered


def plain(weight: Int4Weight) -> Tensor:
    assert weight.zeros is not None
    values = weight.values.double().unflatten(1, (weight.scales.shape[1], -1))
    return ((values - weight.zeros.double()[..., None]) * weight.scales.double()[..., None]).flatten(1)


def random_weight(seed: int, rows: int = 20, inputs: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand((rows, inputs // 32), generator=generator).repeat_interleave(32, dim=1)
    return torch.randn((rows, inputs), generator=generator) * spread + 0.3 * spread


@given(seed=st.integers(0, 2**16))
def test_8_bits_are_off_by_half_a_step_of_their_row(seed: int) -> None:
    weight = random_weight(seed)
    rounded = round_int8(weight)
    steps = weight.abs().amax(1) / 127
    assert int(rounded.values.abs().max()) == 127
    assert torch.allclose(rounded.scales, steps)
    wrong = (rounded.values.double() * rounded.scales.double()[:, None] - weight).abs().amax(1)
    assert torch.all(wrong <= 0.5001 * steps)


def kept(scale: float) -> float:
    """``scale`` rounded to 12 significant bits."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(mantissa * 2**12), exponent - 12)


def best_by_hand(group: Tensor) -> float:
    """The least squared error of a group over all shrinking factors of its bounds."""
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    found = []
    for percent in range(100, 59, -4):
        scale = kept(percent / 100 * (high - low) / 15)
        zero = round(-percent / 100 * low / scale * 256) / 256
        steps = (group / scale + zero).round().clamp(0, 15) - zero
        found.append(float((steps * scale - group).square().sum()))
    return min(found)


@pytest.mark.parametrize("instructions", [name for name in INSTRUCTION_SETS if offered(name)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_4_bits_are_the_best_of_all_bounds(instructions: str, dtype: torch.dtype, group: int) -> None:
    weight = random_weight(group).to(dtype)
    native = kernels(instructions)
    native.use_threads(3)
    rounded = round_int4(native, weight, group)
    assert int(rounded.values.max()) <= 15
    wrong = (plain(rounded) - weight.double()).square().view(20, -1, group).sum(2)
    by_hand = [[best_by_hand(part) for part in row.view(-1, group)] for row in weight.double()]
    assert torch.allclose(wrong, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-3, atol=1e-12)


def test_what_4_bits_can_hold_is_held_exactly() -> None:
    values = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    values[:, [0, 1, 32, 33]] = torch.tensor([0, 15, 0, 15])
    weight = (values - 8).float() * 0.25
    rounded = round_int4(kernels(), weight, 32)
    assert torch.equal(plain(rounded).float(), weight)


def test_blocks_with_a_least_weight_are_held_to_a_256th_of_a_step() -> None:
    """Like GGUF's Q4_1 blocks, which have a scale and a minimum in float16 for 32 weights."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (8, 2, 32), generator=generator)
    values[..., :2] = torch.tensor([0, 15])
    scales = (torch.rand((8, 2, 1), generator=generator) + 0.1).half().float()
    weight = (values * scales - (scales * (torch.rand((8, 2, 1), generator=generator) * 15)).half()).flatten(1)
    rounded = round_int4(kernels(), weight, 32)
    assert torch.equal(rounded.values, values.flatten(1).to(torch.uint8))
    assert torch.equal(rounded.scales, scales.squeeze(2))
    assert torch.all((plain(rounded) - weight).abs().view(8, 2, 32) <= scales / 256)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_groups_without_spread_survive(value: float) -> None:
    weight = torch.full((4, 64), value)
    assert torch.allclose(plain(round_int4(kernels(), weight, 32)).float(), weight, rtol=2**-12, atol=1e-6)
    eight = round_int8(weight)
    assert torch.allclose(eight.values * eight.scales[:, None], weight, atol=1e-6)


def test_groups_of_4_bits_are_of_32_inputs() -> None:
    assert [group_of(inputs) for inputs in (64, 96, 256, 4864)] == [32, 32, 32, 32]
    with pytest.raises(ValueError, match="multiple of 32, not 80"):
        group_of(80)
    with pytest.raises(ValueError, match="96 inputs cannot be rounded in groups of 64"):
        round_int4(kernels(), torch.zeros(4, 96), 64)


def test_8_bits_of_a_group_are_off_by_half_a_step_of_their_group() -> None:
    weight = random_weight(3)
    rounded = round_int8(weight, 32)
    steps = weight.unflatten(1, (-1, 32)).abs().amax(2) / 127
    assert torch.allclose(rounded.scales, steps)
    wrong = rounded.values.double() * rounded.scales.double().repeat_interleave(32, 1) - weight
    assert torch.all(wrong.abs().unflatten(1, (-1, 32)).amax(2) <= 0.5001 * steps)

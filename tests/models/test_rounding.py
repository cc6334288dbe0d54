"""Rounding loses no more than its steps allow, and the search for bounds never makes it worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raylm.models import rounding
from raylm.models.rounding import group_of, round_int4, round_int8
from raylm.native import Int4Weight


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


@given(seed=st.integers(0, 2**16), group=st.sampled_from([32, 64, 128]))
def test_4_bits_without_a_search_are_off_by_a_step_of_their_group(seed: int, group: int) -> None:
    weight = random_weight(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_CLIPS", (1.0,))
        unsearched = round_int4(weight, group)
    wide = weight.view(20, -1, group)
    steps = (wide.amax(2).clamp(min=0) - wide.amin(2).clamp(max=0)) / 15
    wrong = (plain(unsearched) - weight).view(20, -1, group).abs().amax(2)
    assert torch.all(wrong <= 1.001 * steps)  # half for the value, half for the zero
    searched = plain(round_int4(weight, group))
    before, after = ((found - weight).square().view(20, -1, group).sum(2) for found in (plain(unsearched), searched))
    assert torch.all(after <= before * 1.001)
    assert float(after.sum()) < float(before.sum())


def test_what_4_bits_can_hold_is_held_exactly() -> None:
    values = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    values[:, [0, 1, 32, 33]] = torch.tensor([0, 15, 0, 15])
    weight = (values - 8).float() * 0.25
    rounded = round_int4(weight, 32)
    assert torch.equal(plain(rounded).float(), weight)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_groups_without_spread_survive(value: float) -> None:
    weight = torch.full((4, 64), value)
    assert torch.allclose(plain(round_int4(weight, 32)).float(), weight, atol=1e-6)
    eight = round_int8(weight)
    assert torch.allclose(eight.values * eight.scales[:, None], weight, atol=1e-6)


def test_pieces_of_a_large_weight_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(3)
    whole = round_int4(weight.bfloat16(), 64)
    monkeypatch.setattr(rounding, "_ROWS_AT_ONCE", 7)
    pieces = round_int4(weight.bfloat16(), 64)
    assert torch.equal(whole.values, pieces.values)
    assert torch.equal(whole.scales, pieces.scales)


def test_groups_are_the_largest_that_fit() -> None:
    assert [group_of(inputs) for inputs in (64, 96, 256, 4864)] == [64, 32, 64, 64]
    with pytest.raises(ValueError, match="multiple of 32, not 80"):
        group_of(80)

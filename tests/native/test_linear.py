"""Quantized products equal those of dequantized weights, on every instruction set, and packing keeps each weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raylm.native import Int4Weight, Int8Weight, NativeLinear, kernels
from raylm.native.build import INSTRUCTION_SETS, offered

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
OFFERED = [name for name in INSTRUCTION_SETS if offered(name)]
MOST_GROUPS = 4


def rounded_by_group(x: Tensor, group: int) -> tuple[Tensor, float]:
    """(rows, in) float64: each group of a row rounded to 127 steps on both sides of 0, up to its largest input.

    Also returns the possible difference of a product with unit weights, because the kernel computes in float32 and may
    round a value between two steps to the other side.
    """
    groups = x.double().unflatten(1, (-1, group))
    steps = groups.abs().amax(2, keepdim=True) / 127
    exact = groups / steps
    between = (exact - exact.floor() - 0.5).abs() < 3e-5
    return (exact.round() * steps).flatten(1), float((between * steps).sum((1, 2)).max())


def plain(weight: Int4Weight) -> Tensor:
    """(out, in) float64, computed value by value as Int4Weight defines it."""
    group = weight.values.shape[1] // weight.scales.shape[1]
    zeros = torch.full(weight.scales.shape, 8) if weight.zeros is None else weight.zeros
    rows = zip(weight.values, weight.scales.double(), zeros.double(), strict=True)
    return torch.stack(
        [(row.double() - zero.repeat_interleave(group)) * scale.repeat_interleave(group) for row, scale, zero in rows]
    )


def random_int4(outputs: int, group: int, groups: int, zeros: bool, generator: torch.Generator) -> Int4Weight:
    values = torch.randint(0, 16, (outputs, group * groups), generator=generator, dtype=torch.uint8)
    scales = (torch.rand((outputs, groups), generator=generator) + 0.1).half().float()
    found = torch.randint(0, 16 * 256, scales.shape, generator=generator) / 256
    return Int4Weight(values, scales, found if zeros else None)


@pytest.mark.parametrize("instructions", OFFERED)
@pytest.mark.parametrize("threads", [1, 3])
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 90),
    group=st.sampled_from([8, 24, 32, 64, 128, 384]),
    groups=st.integers(1, MOST_GROUPS),
    zeros=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=60, deadline=None)
def test_int4_equals_a_float64_product_of_rounded_groups(
    instructions: str,
    threads: int,
    rows: int,
    outputs: int,
    group: int,
    groups: int,
    zeros: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(rows * outputs + group)
    native = kernels(instructions)
    native.use_threads(threads)
    weight = random_int4(outputs, group, groups, zeros, generator)
    x = torch.randn((rows, group * groups), generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator) if biased else None
    rounded, doubt = rounded_by_group(x, min(group, 96 if group == 384 else 128))
    wanted = rounded @ plain(weight).T + (0 if bias is None else bias.double())
    got = NativeLinear(native, weight, bias)(x)
    assert got.shape == wanted.shape
    assert got.dtype == dtype
    most = float((rounded.abs() @ plain(weight).abs().T).max())
    assert float((got.double() - wanted).abs().max()) < TOLERANCE[dtype] * most + doubt * float(
        plain(weight).abs().max()
    )


@pytest.mark.parametrize("instructions", OFFERED)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_int8_equals_a_float64_product_of_rounded_rows(instructions: str, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-128, 128, (50, 76), generator=generator).to(torch.int8)
    weight = Int8Weight(values, torch.rand(50, generator=generator) + 0.1)
    x = torch.randn((rows, 76), generator=generator).to(dtype)
    steps = x.double().abs().amax(1, keepdim=True) / 127
    rounded = (x.double() / steps).round() * steps
    wanted = rounded @ (values.double() * weight.scales.double()[:, None]).T
    got = NativeLinear(kernels(instructions), weight, None)(x).double()
    # A value halfway between two steps may be rounded to different sides by the reference and the kernel.
    half_step = 0.5 * float(steps.max()) * float(weight.scales.max()) * 128
    assert float((got - wanted).abs().max()) < TOLERANCE[dtype] * float(wanted.abs().max()) + 2 * half_step / 128
    assert float((got - wanted).abs().median()) < TOLERANCE[dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("instructions", OFFERED)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "group", "groups"), [(1, 64, 3), (2, 32, 1), (7, 8, 5), (30, 64, 2)])
def test_int8_by_groups_equals_a_float64_product_of_rounded_groups(
    instructions: str, dtype: torch.dtype, rows: int, group: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-128, 128, (50, group * groups), generator=generator).to(torch.int8)
    weight = Int8Weight(values, torch.rand((50, groups), generator=generator) + 0.1)
    exact = values.double() * weight.scales.double().repeat_interleave(group, 1)
    x = torch.randn((rows, group * groups), generator=generator).to(dtype)
    rounded, doubt = rounded_by_group(x, group)
    bias = torch.randn(50, generator=generator)
    native = kernels(instructions)
    got = NativeLinear(native, weight, bias)(x)
    most = float((rounded.abs() @ exact.abs().T).max())
    wrong = float((got.double() - rounded @ exact.T - bias.double()).abs().max())
    assert wrong < TOLERANCE[dtype] * most + doubt * float(exact.abs().max())
    for row in range(rows):  # a row has the same bits alone
        assert torch.equal(NativeLinear(native, weight, bias)(x[row : row + 1])[0], got[row])


@pytest.mark.parametrize("instructions", OFFERED)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "group", "groups"), [(1, 32, 3), (2, 16, 4), (7, 8, 5), (30, 32, 2)])
def test_offsets_are_added_exactly(
    instructions: str, dtype: torch.dtype, bits: int, rows: int, group: int, groups: int
) -> None:
    """Scales and offsets use all bits of a float32."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(0, 2**bits, (50, group * groups), generator=generator) - (128 if bits == 8 else 0)
    scales, offsets = torch.rand((50, groups), generator=generator), torch.randn((50, groups), generator=generator)
    kind, stored = (Int4Weight, torch.uint8) if bits == 4 else (Int8Weight, torch.int8)
    weight = kind(values.to(stored), scales, offsets=offsets)
    exact = values.double() * scales.double().repeat_interleave(group, 1) + offsets.double().repeat_interleave(group, 1)
    x = torch.randn((rows, group * groups), generator=generator).to(dtype)
    rounded, doubt = rounded_by_group(x, group)
    native = kernels(instructions)
    got = NativeLinear(native, weight, None)(x)
    most = float((rounded.abs() @ exact.abs().T).max())
    wrong = float((got.double() - rounded @ exact.T).abs().max())
    assert wrong < TOLERANCE[dtype] * most + doubt * float(exact.abs().max())
    for row in range(rows):
        assert torch.equal(NativeLinear(native, weight, None)(x[row : row + 1])[0], got[row])
    unit = NativeLinear(native, weight, None)(torch.eye(group * groups))  # inputs that are rounded exactly
    torch.testing.assert_close(unit.double().T, exact, rtol=3e-7, atol=3e-7 * float(exact.abs().max()))


def test_no_rows_give_no_rows() -> None:
    weight = random_int4(20, 32, 2, True, torch.Generator().manual_seed(0))
    assert NativeLinear(kernels(), weight, None)(torch.zeros(0, 64)).shape == (0, 20)


def test_every_place_of_a_unit_is_told_apart() -> None:
    """One input at a time, with weights that differ from their neighbours."""
    values = (torch.arange(16 * 64).view(16, 64) * 7 % 16).to(torch.uint8)
    weight = Int4Weight(values, torch.ones(16, 2))
    for dtype in TOLERANCE:
        out = NativeLinear(kernels(), weight, None)(torch.eye(64, dtype=dtype))
        assert torch.equal(out.float().T, values.float() - 8)


def test_a_scale_that_overflows_harms_its_own_column_alone() -> None:
    weight = random_int4(40, 32, 2, False, torch.Generator().manual_seed(1))
    weight.scales[7] = float("inf")
    out = NativeLinear(kernels(), weight, None)(torch.ones(3, 64))
    assert out[:, :7].isfinite().all()
    assert out[:, 8:].isfinite().all()
    assert not out[:, 7].isfinite().any()


@pytest.mark.parametrize("instructions", OFFERED)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_inputs_that_are_not_finite_harm_their_own_row_alone(instructions: str, wrong: float) -> None:
    """No integer overflows either, which the sanitizers check."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-128, 128, (50, 76), generator=generator).to(torch.int8)
    for weight, inputs in (
        (Int8Weight(values, torch.rand(50, generator=generator)), 76),
        (Int8Weight(values[:, :64], torch.rand((50, 2), generator=generator)), 64),
        (random_int4(16, 64, 2, True, generator), 128),
    ):
        linear = NativeLinear(kernels(instructions), weight, None)
        x = torch.randn((3, inputs), generator=generator)
        wanted = linear(x)
        x[1] = wrong
        x[1, ::3] = -wrong
        found = linear(x)
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (Int8Weight(torch.zeros(16, 30, dtype=torch.int8), torch.ones(16)), "30 inputs are not a multiple of 4"),
        (Int8Weight(torch.zeros(16, 36, dtype=torch.int8), torch.ones(16, 3)), "36 inputs are no 3 groups"),
        (Int4Weight(torch.zeros(16, 36, dtype=torch.uint8), torch.ones(16, 1)), "36 inputs"),
        (Int4Weight(torch.zeros(16, 96, dtype=torch.uint8), torch.ones(16, 5)), "96 inputs are no 5 groups"),
        (torch.zeros(16, 3, dtype=torch.bfloat16), "3 inputs are not a multiple of 2"),
    ],
)
def test_inputs_that_fill_no_unit_are_refused(weight: Tensor | Int8Weight | Int4Weight, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NativeLinear(kernels(), weight, None)


def test_bytes_are_those_that_a_step_reads() -> None:
    weight = random_int4(32, 64, 2, False, torch.Generator().manual_seed(0))
    assert weight.nbytes == 32 * 128 // 2 + 32 * 2 * 4
    assert Int8Weight(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)).nbytes == 4 * 8 + 4 * 4


def test_rows_of_four_inputs_have_room_for_their_scale() -> None:
    weight = Int8Weight(torch.full((16, 4), 127, dtype=torch.int8), torch.ones(16))
    found = NativeLinear(kernels(), weight, None)(torch.ones(300, 4))
    assert torch.allclose(found, torch.full((300, 16), 508.0))

"""Products with 4-bit weights, in Triton's interpreter, equal products of the dequantized weights.

test_kernels.py runs this in float32 and float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import pytest
import torch

from raylm.errors import ConfigError
from raylm.models.gpu.int4 import Int4Linear
from raylm.native import Int4Weight


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "group", "symmetric"),
    [(1, 40, 128, 32, False), (70, 72, 256, 128, True), (5, 130, 192, 192, False)],
)
def test_a_product(
    dtype: torch.dtype, bound: float, tokens: int, outputs: int, inputs: int, group: int, symmetric: bool
) -> None:
    draw = torch.Generator().manual_seed(tokens)
    values = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=draw) / inputs**0.5
    zeros = torch.randint(0, 16, scales.shape, generator=draw).float()
    x, bias = torch.randn(tokens, inputs, generator=draw).to(dtype), torch.randn(outputs, generator=draw).to(dtype)
    meant = values.double() - (8 if symmetric else zeros.repeat_interleave(group, 1))
    wanted = x.double() @ (meant * scales.repeat_interleave(group, 1)).T + bias.double()
    weight = Int4Weight(values, scales, None if symmetric else zeros)
    got = Int4Linear(weight, bias)(x)
    assert got.dtype == dtype
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < bound
    without = Int4Linear(weight, None)(x)
    assert float((without.double() + bias.double() - wanted).abs().max() / wanted.abs().max()) < bound


def test_groups_that_do_not_fit_are_named_and_there_may_be_no_rows() -> None:
    values = torch.zeros(8, 48, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="a multiple of 32 inputs share a scale, not 24"):
        Int4Linear(Int4Weight(values, torch.ones(8, 2)), None)
    linear = Int4Linear(Int4Weight(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2)), None)
    assert linear(torch.zeros(0, 64)).shape == (0, 8)

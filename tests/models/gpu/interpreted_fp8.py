"""Products of fp8 weights with block scales, in Triton's interpreter, equal products of the dequantized weights.

test_kernels.py runs this in float32 and float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raylm.models.gpu import fp8
from raylm.models.gpu.fp8 import Fp8BlocksLinear

FP8 = torch.float8_e4m3fn


def by_blocks(weight: Tensor, scales: Tensor, granule: int) -> Tensor:
    """The dequantized weights, computed one by one."""
    out = weight.double()
    for row in range(len(out)):
        for column in range(out.shape[1]):
            out[row, column] *= float(scales[row // granule, column // 128])
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "granule"), [(1, 40, 128, 128), (5, 200, 384, 64), (70, 72, 256, 16)]
)
def test_a_product(dtype: torch.dtype, bound: float, tokens: int, outputs: int, inputs: int, granule: int) -> None:
    """Groups of inputs differ by a factor of a thousand, but all inputs are exact in fp8 with a power-of-two scale."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randint(-7, 8, (tokens, inputs), generator=draw).float()
    x[:, ::128] = 7
    x *= torch.logspace(-6, 4, inputs // 128, base=2).round().repeat_interleave(128) + 1
    weight = torch.randn(outputs, inputs, generator=draw).to(FP8)
    scales = torch.rand(-(-outputs // granule), inputs // 128, generator=draw) / inputs**0.5
    bias = torch.randn(outputs, generator=draw).to(dtype)
    wanted = x.double() @ by_blocks(weight, scales, granule).T
    got = Fp8BlocksLinear(weight, scales, granule, None)(x.to(dtype))
    assert got.dtype == dtype
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < bound
    biased = Fp8BlocksLinear(weight, scales, granule, bias)(x.to(dtype))
    wanted += bias.double()
    assert float((biased.double() - wanted).abs().max() / wanted.abs().max()) < bound


def test_scales_of_other_blocks_are_seen_and_there_may_be_no_rows() -> None:
    """A planted fault: the scales of the neighbouring outputs."""
    x, weight = torch.ones(3, 256), torch.ones(128, 256).to(FP8)
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert Fp8BlocksLinear(weight, scales, 64, None)(x)[:, [0, 64]].tolist() == [[384.0, 1536.0]] * 3
    assert Fp8BlocksLinear(weight, scales.flip(0), 64, None)(x)[:, [0, 64]].tolist() == [[1536.0, 384.0]] * 3
    assert Fp8BlocksLinear(weight, scales, 64, None)(x[:0]).shape == (0, 128)
    assert fp8._RUN == 128

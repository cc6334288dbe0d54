"""The product of one row in Triton's interpreter, compared with torch. test_kernels.py runs this in another process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from raylm.models.gpu.row_product import RowLinear, RowTile, multiply_row


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(6, 64), (9, 300), (5, 96)])
def test_one_row(outputs: int, inputs: int, bias: bool) -> None:
    """Sizes that no tile divides."""
    generator = torch.Generator().manual_seed(outputs)
    x, weight, added = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((1, inputs), (outputs, inputs), (outputs,))
    )
    wanted = functional.linear(x.float(), weight.float(), added.float() if bias else None)
    got = multiply_row(x, weight, added if bias else None, RowTile(4, 128, 4))
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), wanted, atol=2e-2 * float(wanted.abs().max()))


def test_more_rows_and_float32_are_torchs() -> None:
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    assert torch.equal(RowLinear(weight, None)(x), functional.linear(x, weight))
    assert torch.equal(RowLinear(weight, None)(x[:1]), functional.linear(x[:1], weight))

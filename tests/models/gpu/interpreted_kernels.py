"""The elementwise kernels in Triton's interpreter equal torch.

test_kernels.py runs this in a separate process, because the interpreter is chosen when triton is imported. It uses
float32 and float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from raylm.models.elementwise import FP8, TORCH, HeadWeights, KVPlaces
from raylm.models.gpu.elementwise import TritonElementwise
from raylm.models.gpu.fp8 import round_rows
from raylm.models.quantization.fp8 import round_rows as torch_round_rows
from tests.fp8 import nearest

KERNELS = TritonElementwise()
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(params=list(BOUNDS), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def near(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted.float(), atol=BOUNDS[wanted.dtype], rtol=BOUNDS[wanted.dtype])


@pytest.mark.parametrize("size", [64, 96, 1000])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(dtype: torch.dtype, size: int, has_delta: bool) -> None:
    x, weight = torch.randn(5, size, dtype=dtype), torch.randn(size, dtype=dtype)
    delta = torch.randn(5, size, dtype=dtype) if has_delta else None
    wanted = TORCH.add_rms_norm(x.clone(), delta, weight, 1e-5)
    got = KERNELS.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(got[0], wanted[0])
    near(got[1], wanted[1])


@pytest.mark.parametrize("inner", [96, 1024, 1500])
def test_silu_and_mul(dtype: torch.dtype, inner: int) -> None:
    gate_up = 4 * torch.randn(3, 2 * inner, dtype=dtype)
    near(KERNELS.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (8, 8, 80), (9, 1, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_write(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, has_norm: bool) -> None:
    """Slots without a new token do not change."""
    qkv = torch.randn(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = torch.randn(6, 1, head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = HeadWeights(torch.randn(heads + kv_heads, head_dim, dtype=dtype), 1e-6) if has_norm else None
    slots = torch.tensor([17, 3, 40, 0, 8, 9])
    pools = [[torch.full((48, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)] for _ in range(2)]
    got, wanted = (
        how.rotate_and_write(qkv.clone(), (cos, sin), norm, KVPlaces(*pool, slots))
        for how, pool in zip((KERNELS, TORCH), pools, strict=True)
    )
    scale = 4 if dtype == torch.float16 else 1  # torch rounds between the norm, its weight and the rotation
    torch.testing.assert_close(got.float(), wanted.float(), atol=scale * BOUNDS[dtype], rtol=scale * BOUNDS[dtype])
    for mine, theirs in zip(*pools, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=scale * BOUNDS[dtype], rtol=scale * BOUNDS[dtype])
    rest = [slot for slot in range(48) if slot not in slots.tolist()]
    assert all((pool[rest] == 7).all() for pool in pools[0])


def rounding_to_fp8(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to fp8 by a search, because its own cast loses a carry into the exponent.

    Values beyond the range become NaN, as in a cast without saturation. The compiled kernel shows that a GPU rounds to
    the nearest value, and ties to the even one.
    """
    cast = InterpreterBuilder.create_fp_to_fp

    def to(self: Any, source: TensorHandle, target: tl.dtype, mode: Any) -> TensorHandle:
        if target.scalar != tl.float8e4nv:
            return cast(self, source, target, mode)  # type: ignore[no-any-return]
        wide = torch.from_numpy(source.data.astype(np.float64))
        found = torch.where(wide.abs() <= 464, nearest(wide), float("nan")).to(FP8)
        return TensorHandle(found.view(torch.uint8).numpy(), tl.float8e4nv)

    patch.setattr(InterpreterBuilder, "create_fp_to_fp", to)


def test_keys_and_values_are_written_as_fp8(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided by their scales, rounded to the nearest value, and at most 448. NaN stays NaN."""
    rounding_to_fp8(monkeypatch)
    heads, kv_heads, head_dim = 4, 2, 16
    qkv = (torch.randn(6, heads + 2 * kv_heads, head_dim) * torch.logspace(-3, 3, 6)[:, None, None]).to(dtype)
    qkv[0, heads, 3], qkv[1, heads + kv_heads, 9] = float("nan"), float("nan")
    turns = torch.tensor([0, 1, 2, 3, 0, 1])[:, None, None].expand(6, 1, head_dim // 2)  # exact quarter turns
    cos, sin = ((turns == 0).float() - (turns == 2).float()).to(dtype), ((turns == 1).float() - (turns == 3).float())
    slots = torch.tensor([17, 3, 40, 0, 8, 9])
    pools = [torch.full((48, kv_heads, head_dim), 7.0).to(FP8) for _ in range(2)]
    q = KERNELS.rotate_and_write(qkv.clone(), (cos, sin.to(dtype)), None, KVPlaces(*pools, slots, 0.125, 0.3))
    turned = TORCH.rotate(qkv[:, : heads + kv_heads], (cos, sin.to(dtype)), None)
    assert torch.equal(q, turned[:, :heads])
    for pool, rows, scale in ((pools[0], turned[:, heads:], 0.125), (pools[1], qkv[:, heads + kv_heads :], 0.3)):
        over = rows.float() * torch.tensor(1 / scale)
        torch.testing.assert_close(
            pool[slots].double(),
            torch.where(over.isnan(), over.double(), nearest(over)),
            atol=0,
            rtol=0,
            equal_nan=True,
        )
        assert pool[slots].isnan().any()
        assert float(pool[slots].float().nan_to_num(0).abs().max()) == 448
        rest = [slot for slot in range(48) if slot not in slots.tolist()]
        assert (pool[rest].float() == 7).all()


def test_rows_are_brought_to_fp8(dtype: torch.dtype) -> None:
    """Each row gets its own scale, also a row of zeros.

    The values are exact in fp8, because the interpreter rounds wrongly up to a power of two. The compiled kernel shows
    that a GPU rounds to the nearest value.
    """
    values = torch.randint(-7, 8, (5, 96)) * 2.0 ** torch.randint(-2, 7, (5, 96))
    values[:, 0], values[3] = 448, 0
    steps = torch.tensor([0.125, 2**-6, 1, 1e-12, 0.5])[:, None]
    rounded, scales = round_rows((values * steps).to(dtype))
    assert rounded.dtype == torch.float8_e4m3fn
    assert torch.equal(rounded.float(), values)
    assert torch.allclose(scales[[0, 1, 2, 4]], steps[[0, 1, 2, 4]], rtol=1e-6, atol=0)
    assert float(scales[3]) > 0


def dropping_nan(patch: pytest.MonkeyPatch) -> None:
    """Let ``tl.maximum`` and ``tl.minimum`` return the other number for NaN, as on a GPU.

    The interpreter returns NaN.
    """
    patch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
    patch.setattr(InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))


def test_what_is_not_a_number_stays_none_in_rows_of_fp8(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products with that row are NaN, as in torch. The other rows do not change."""
    rounding_to_fp8(monkeypatch)
    dropping_nan(monkeypatch)
    values = torch.full((3, 96), 448.0, dtype=dtype)
    values[1, 3] = float("nan")
    rounded, scales = round_rows(values)
    wanted, wanted_scales = torch_round_rows(values)
    product, torchs = rounded.float() * scales, wanted.float() * wanted_scales
    assert product.isnan().any(1).tolist() == torchs.isnan().any(1).tolist() == [False, True, False]
    assert bool(rounded[1, 3].isnan())
    assert torch.equal(product[[0, 2]], torchs[[0, 2]])


def test_no_tokens() -> None:
    x = torch.empty(0, 64)
    assert KERNELS.add_rms_norm(x, None, torch.ones(64), 1e-5)[1].shape == (0, 64)
    assert KERNELS.silu_and_mul(x).shape == (0, 32)

"""Every linear kernel equals a float64 product, stacked parts get their rows, and a fallback is logged."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from raylm.models import linear
from raylm.models.linear import Linear, dense, prepacked, probe, select_kernels
from raylm.native import NativeError, NativeLinear, kernels

CPU = torch.device("cpu")


def native(weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
    return NativeLinear(kernels(), weight, bias)


@pytest.mark.parametrize("kernel", [dense, prepacked, native])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_equal_a_float64_product(
    kernel: linear.KernelFactory, dtype: torch.dtype, limit: float, rows: int, biased: bool
) -> None:
    if kernel is prepacked and (reason := probe(dtype)):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 72), (50, 72)))
    bias = torch.randn(50, generator=generator).to(dtype) if biased else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.inference_mode():
        got = kernel(weight, bias)(x)
    assert got.shape == (rows, 50)
    assert got.dtype == dtype
    assert torch.all((got.double() - wanted).abs() <= limit * (1 + wanted.abs().max() if rows else 1))


def test_parts_are_rows_of_one_product() -> None:
    layer = Linear(4, {"a": 2, "b": 3}, bias=True)
    targets = dict(layer.targets("ab"))
    for value, (name, target) in enumerate(targets.items()):
        target.fill_(value)
        assert name in {"a.weight", "a.bias", "b.weight", "b.bias"}
    layer.freeze(dense)
    out = layer(torch.ones(1, 4))[0]
    a = targets["a.weight"][0].sum() + targets["a.bias"][0]
    b = targets["b.weight"][0].sum() + targets["b.bias"][0]
    assert a != b
    assert out.tolist() == [float(a)] * 2 + [float(b)] * 3
    assert not list(layer.parameters())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NativeError("there is no C++ compiler")

    monkeypatch.setattr(linear, "kernels", refuse)


def test_native_on_a_cpu_dense_elsewhere() -> None:
    assert isinstance(select_kernels(CPU, torch.float32)(torch.zeros(4, 4), None), NativeLinear)
    assert select_kernels(torch.device("cuda"), torch.float32) is dense


@pytest.mark.usefixtures("no_compiler")
def test_prepacked_without_a_compiler_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert select_kernels(CPU, torch.float32) is (prepacked if probe(torch.float32) is None else dense)
    assert "there is no C++ compiler" in caplog.text


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (lambda *args: (_ for _ in ()).throw(RuntimeError("gone")), "does not offer it"),
        (lambda x, *args: x.new_zeros(len(x), 96), "wrong by 1.000"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_without_a_working_kernel_it_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, op: object, reason: str
) -> None:
    ops = SimpleNamespace(
        _reorder_linear_weight=lambda weight, rows: weight,
        _linear_pointwise=op,
        _is_mkldnn_bf16_supported=lambda: False,
    )
    monkeypatch.setattr(linear.torch, "ops", SimpleNamespace(mkldnn=ops))
    with caplog.at_level(logging.WARNING):
        assert select_kernels(CPU, torch.float32) is dense
    assert reason in caplog.text
    assert "AVX-512" in str(probe(torch.bfloat16))

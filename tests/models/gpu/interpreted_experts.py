"""Grouped products of experts, in Triton's interpreter, equal products of one expert after the other.

test_kernels.py runs this in float32 and float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.models.gpu import experts
from raylm.models.gpu.experts import TritonExperts, most_tiles


def gate(gate_up: Tensor) -> Tensor:
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def one_by_one(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The reference: each token alone, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(index.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            inner = gate(gate_up[expert].double() @ x[token].double())
            out[token] += share * (down[expert].double() @ inner)
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "inner"),
    [
        (1, 4, 2, 64, 32),
        (50, 3, 2, 80, 72),
        (70, 2, 1, 40, 24),
        pytest.param(3, 128, 8, 48, 40, marks=pytest.mark.long),
        pytest.param(7, 5, 5, 200, 100, marks=pytest.mark.long),
    ],
)
def test_grouped_products_are_those_one_by_one(
    dtype: torch.dtype, bound: float, tokens: int, count: int, chosen: int, hidden: int, inner: int
) -> None:
    """Few and many rows, more experts than rows, all experts for each token, sizes that no tile divides."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    gate_up = (torch.randn(count, 2 * inner, hidden, generator=draw) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, inner, generator=draw) / inner**0.5).to(dtype)
    index = torch.stack([torch.randperm(count, generator=draw)[:chosen] for _ in range(tokens)])
    weights = torch.rand(tokens, chosen, generator=draw)
    got = TritonExperts(gate_up, down, gate)(x, index, weights)
    assert got.dtype == dtype
    wanted = one_by_one(x, index, weights, gate_up, down)
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < bound


def test_all_rows_may_have_one_expert_and_there_may_be_none() -> None:
    draw = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(3, 64, 32, generator=draw), torch.randn(3, 32, 32, generator=draw)
    x, weights = torch.randn(20, 32, generator=draw), torch.rand(20, 1, generator=draw)
    grouped = TritonExperts(gate_up, down, gate)
    for expert in (0, 2):
        index = torch.full((20, 1), expert)
        wanted = one_by_one(x, index, weights, gate_up, down)
        torch.testing.assert_close(grouped(x, index, weights).double(), wanted, atol=1e-4, rtol=1e-4)
    assert grouped(x[:0], index[:0], weights[:0]).shape == (0, 32)


def test_there_are_never_more_tiles_than_are_launched() -> None:
    for groups in (1, 2, 5):
        for pairs in range(1, 40):
            for rows in (2, 16):
                worst = min(pairs, groups)
                spread = [1] * (worst - 1) + [pairs - worst + 1]
                assert sum(-(-count // rows) for count in spread) <= most_tiles(pairs, groups, rows)
                even = [pairs // groups + (at < pairs % groups) for at in range(groups)]
                assert sum(-(-count // rows) for count in even) <= most_tiles(pairs, groups, rows)


def test_a_tile_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the last tile is not launched."""
    monkeypatch.setattr(experts, "most_tiles", lambda *shape: most_tiles(*shape) - 1)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # unwritten outputs are zero
    with pytest.raises(AssertionError):
        test_grouped_products_are_those_one_by_one(torch.float32, 1e-5, 1, 4, 2, 64, 32)

"""Experts on a GPU: sorts tokens by expert on the device, and multiplies all experts in one launch for each product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from raylm.models.experts import Gate
from raylm.models.gpu import expert_kernels

_FEW = 32  # average pairs for each expert, up to which tiles are small
_INNER = 1024  # columns of one program of add_weighted


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The work of one program: ROWS x COLUMNS, from DEPTH inputs at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTile:
    """The tile for so many pairs. Small if experts have few rows, because reading their weights dominates."""
    narrow = 4 // dtype.itemsize
    if pairs <= _FEW * experts:
        return ExpertTile(16, 64, 64 * narrow, 4, 3)
    return ExpertTile(64, 128, 32 * narrow, 4, 3)


def most_tiles(pairs: int, groups: int, rows: int) -> int:
    """The maximum number of tiles of ``rows``, for any distribution of pairs to groups."""
    full = max(0, pairs - groups) // rows
    return min(pairs, full + groups)


class TritonExperts:
    """Experts with plain weights in one tensor; see ``raylm.models.experts.GroupedExperts``.

    Sums are in float32. The result of a row does not depend on other rows of its expert.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, gate: Gate) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self._experts = torch.arange(len(gate_up), device=gate_up.device)

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not len(x):
            return x
        sorted_index, order = index.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_index, self._experts, right=True, out_int32=True)
        gate_up = self._product(x.contiguous(), self._gate_up, order, ends)
        products = self._product(self._gate(gate_up).contiguous(), self._down, order, ends)
        return self._add(products, weights.contiguous(), x.dtype)

    def _product(self, x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """(rows, inputs) -> (pairs, outputs): a pair's row times its expert's weight (outputs, inputs)."""
        pairs, (experts, outputs, inputs) = len(order), weight.shape
        tile = tile_of(pairs, experts, x.dtype)
        out = x.new_empty(pairs, outputs)
        expert_kernels.product_by_expert[most_tiles(pairs, experts, tile.rows), triton.cdiv(outputs, tile.columns)](
            x, weight, out, order, ends, experts, inputs, outputs,
            FAN=pairs // len(x), EXPERTS=triton.next_power_of_2(experts),
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    def _add(self, products: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        (tokens, chosen), size = weights.shape, products.shape[1]
        out = products.new_empty(tokens, size, dtype=dtype)
        expert_kernels.add_weighted[tokens, triton.cdiv(size, _INNER)](
            products, weights, out, size, FAN=chosen, WIDTH=_INNER
        )
        return out

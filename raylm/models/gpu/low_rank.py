"""LoRA adapters on a GPU: two launches for each linear layer, for any adapters of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import triton
from numpy.typing import NDArray
from torch import Tensor

from raylm.models.causal_lm import CausalLM
from raylm.models.gpu import low_rank_kernels
from raylm.models.gpu.experts import most_tiles
from raylm.models.linear import Linear, LinearKernel
from raylm.models.lora import AdapterLimits, LowRank, LowRankLayers, Weights
from raylm.native import AdapterRun

_LANES = 16  # the minimum number of columns of a matrix product
_FEW = 512  # tokens up to which tiles are small
_ENTRY = 4  # addresses of down and up, the rank, and padding, so that entries are aligned to 16 bytes
_PIECE = 1024  # minimum number of inputs that a program sums


@dataclass(frozen=True, slots=True, eq=False)
class GpuAdapter:
    """A packed adapter. ``table`` (layers, 4) has the addresses of each layer's products in ``memory``."""

    memory: list[Tensor]
    table: NDArray[np.int64]


class GroupedLowRank(LowRankLayers):
    """Rows with the same adapter form a group. The groups' data are in memory with fixed addresses.

    So a step launches the same kernels for any adapters, and can be captured. Uploaded data exist twice on the host,
    because two steps may be in progress.
    """

    capturable = True

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device, limits: AdapterLimits) -> None:
        super().__init__(model, dtype, device, limits)
        self._groups = triton.next_power_of_2(limits.max_num_seqs)
        self._rank = -(-limits.max_rank // _LANES) * _LANES
        layers, pinned = len(self._layers), device.type == "cuda"
        shapes = {
            "ends": ((self._groups,), torch.int32),
            "order": ((limits.max_num_tokens,), torch.int32),
            "table": ((self._groups, layers * _ENTRY), torch.int64),
        }
        self._host = [
            {name: torch.zeros(shape, dtype=dtype, pin_memory=pinned) for name, (shape, dtype) in shapes.items()}
            for _ in range(2)
        ]
        self._device_side = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }
        self._active = False

    def begin(self, runs: Sequence[AdapterRun]) -> None:
        self._active = bool(runs)
        if not runs or list(runs) == self._runs:
            return
        self._runs = list(runs)
        self._host.reverse()
        groups: dict[int, list[AdapterRun]] = {}
        for run in runs:
            groups.setdefault(id(run.adapter), []).append(run)
        host = {name: tensor.numpy() for name, tensor in self._host[0].items()}
        end = 0
        for group, members in enumerate(groups.values()):
            for run in members:
                host["order"][end : end + run.count] = np.arange(run.start, run.start + run.count)
                end += run.count
            adapter = members[0].adapter
            assert isinstance(adapter, GpuAdapter)
            host["ends"][group] = end
            host["table"][group] = adapter.table.reshape(-1)
        host["ends"][len(groups) :] = end
        for name, count in (("ends", self._groups), ("order", end), ("table", len(groups))):
            self._device_side[name][:count].copy_(self._host[0][name][:count], non_blocking=True)

    def hold(self, adapted: bool) -> None:
        """For capturing: if ``adapted``, launch the adapters' kernels although no row has an adapter."""
        self._active, self._runs = adapted, []
        self._device_side["ends"].zero_()

    def pack(self, weights: Weights) -> GpuAdapter:
        memory: list[Tensor] = []
        table = np.zeros((len(self._layers), _ENTRY), np.int64)
        for entry, (prefix, layer) in zip(table, self._layers, strict=True):
            found = {part: weights[f"{prefix}{part}"] for part in layer.parts if f"{prefix}{part}" in weights}
            if found:
                down, up = (side.to(self._device, self._dtype) for side in _aligned(layer, found))
                memory += [down, up]
                entry[:3] = self._address(down), self._address(up), up.shape[1]
        return GpuAdapter(memory, table)

    def _address(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def compile_all(self) -> None:
        """Compile the kernels for steps of any size."""
        self.hold(adapted=True)
        for at, (_, layer) in enumerate(self._layers):
            for tokens in (_FEW, _FEW + 1):
                x = torch.zeros(min(tokens, len(self._device_side["order"])), layer.in_features, dtype=self._dtype)
                x = x.to(self._device)
                self._add(at, x, x.new_zeros(len(x), sum(layer.parts.values())))

    def _multiply(self, base: LinearKernel, at: int, x: Tensor) -> Tensor:
        out = base(x)
        if self._active and len(x):
            self._add(at, x.contiguous(), out)
        return out

    def _add(self, at: int, x: Tensor, out: Tensor) -> None:
        (tokens, inputs), outputs = x.shape, out.shape[1]
        sizes = list(self._layers[at][1].parts.values())
        rows = 16 if tokens <= _FEW else 64
        split = max(1, min(8, inputs // _PIECE)) if rows == 16 else 1
        narrow = torch.empty(split, tokens, len(sizes) * self._rank, dtype=torch.float32, device=x.device)
        table = self._device_side["table"][:, at * _ENTRY :]
        where = table, self._device_side["order"], self._device_side["ends"], self._groups, table.stride(0), tokens
        options = {"PARTS": len(sizes), "RANK": self._rank, "GROUPS": self._groups, "ROWS": rows, "SPLIT": split}
        tiles = most_tiles(tokens, self._groups, rows)
        depth = 128 // (2 if x.dtype == torch.float32 else 1)
        low_rank_kernels.low_rank_down[tiles, triton.cdiv(narrow.shape[2], _LANES), split](
            x, narrow, *where, inputs, **options, COLUMNS=_LANES, DEPTH=depth
        )
        starts = [sum(sizes[:part]) if part < len(sizes) else outputs for part in (1, 2)]
        blocks = sum(triton.cdiv(size, 64) for size in sizes)
        low_rank_kernels.low_rank_up[tiles, blocks](
            narrow, out, *where, outputs, *starts, **options, COLUMNS=64, DEPTH=_LANES
        )


def _aligned(layer: Linear, found: dict[str, LowRank]) -> tuple[Tensor, Tensor]:
    """``down`` (parts * rank, in) and ``up`` (out, rank). All parts get the same rank, a multiple of 16."""
    rank = max(-(-len(pair.down) // _LANES) * _LANES for pair in found.values())
    downs, ups = [], []
    for part, rows in layer.parts.items():
        pair = found.get(part, LowRank(torch.zeros(0, layer.in_features), torch.zeros(rows, 0)))
        missing = rank - len(pair.down)
        downs.append(F.pad(pair.down.float(), (0, 0, 0, missing)))
        ups.append(F.pad(pair.up.float(), (0, missing)))
    return torch.cat(downs), torch.cat(ups)

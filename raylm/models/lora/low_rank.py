"""LoRA adapters as a forward pass reads them: for torch modules, and packed for the native decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.models.causal_lm import CausalLM
from raylm.models.linear import HEAD, Linear, LinearKernel, linear_layers
from raylm.models.lora.adapter_files import LowRank
from raylm.native import AdapterRun, PackedAdapter

Weights = Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """(down, up) of each linear layer, None where it has no adapter; of a fused layer those of its parts as one."""

    pairs: list[tuple[Tensor, Tensor] | None]


def adaptable_layers(model: CausalLM) -> list[tuple[str, Linear]]:
    """All but the head, in the model's order."""
    return [(prefix, layer) for prefix, layer in linear_layers(model) if HEAD not in layer.parts]


def adaptable_shapes(model: CausalLM) -> dict[str, tuple[int, int]]:
    """(out, in) of the modules that adapters may change, by the checkpoint's names."""
    return {
        f"{prefix}{part}": (rows, layer.in_features)
        for prefix, layer in adaptable_layers(model)
        for part, rows in layer.parts.items()
    }


class LowRankLayers:
    """Adds low-rank products to the linear layers of a model; ``runs`` says to which tokens of the next pass.

    Made after whatever else reads the layers' kernels.
    """

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
        self.runs: Sequence[AdapterRun] = ()
        self._layers = adaptable_layers(model)
        self._dtype, self._device = dtype, device
        for at, (_, layer) in enumerate(self._layers):
            assert layer.kernel is not None, "adapters are served before the weights are loaded"
            layer.kernel = _LowRankKernel(layer.kernel, self, at)

    def pack(self, weights: Weights) -> ModuleAdapter:
        """Bring an adapter to the device, in the type of the model."""
        pairs = [_fused(prefix, layer, weights) for prefix, layer in self._layers]
        to = self._device, self._dtype
        return ModuleAdapter([pair and (pair[0].to(*to), pair[1].to(*to)) for pair in pairs])


class _LowRankKernel:
    """A layer's own kernel, and then what the adapters of the step add to their rows."""

    def __init__(self, base: LinearKernel, owner: LowRankLayers, at: int) -> None:
        self._base, self._owner, self._at = base, owner, at

    def __call__(self, x: Tensor) -> Tensor:
        out = self._base(x)
        for run in self._owner.runs:
            assert isinstance(run.adapter, ModuleAdapter)
            pair = run.adapter.pairs[self._at]
            if pair is not None:
                rows = slice(run.start, run.start + run.count)
                out[rows] += F.linear(F.linear(x[rows], pair[0]), pair[1])
        return out


def _fused(prefix: str, layer: Linear, weights: Weights) -> tuple[Tensor, Tensor] | None:
    """The adapters of a layer's parts as one: what each reads stacked, what each writes in its own rows and columns."""
    found = {part: weights[f"{prefix}{part}"] for part in layer.parts if f"{prefix}{part}" in weights}
    if not found:
        return None
    ups = [found[part].up if part in found else torch.zeros(rows, 0) for part, rows in layer.parts.items()]
    return torch.cat([pair.down.float() for pair in found.values()]), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def pack_native(model: CausalLM, dtype: torch.dtype, weights: Weights) -> PackedAdapter:
    layers: list[list[tuple[int, Tensor, Tensor]]] = []
    for prefix, layer in adaptable_layers(model):
        parts, column = [], 0
        for part, rows in layer.parts.items():
            pair = weights.get(f"{prefix}{part}")
            if pair is not None:
                parts.append((column, pair.down.to(dtype), pair.up.to(dtype)))
            column += rows
        layers.append(parts)
    return PackedAdapter(layers)

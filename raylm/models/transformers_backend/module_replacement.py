"""Replacements for modules of transformers' modeling code: stacked linear layers, and separate experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from raylm.models.experts import GroupedExperts, group_experts
from raylm.models.linear import HEAD, Head, KernelFactory, Linear
from raylm.models.transformers_backend.inspection import UnservedError, layer_shape


class Stack:
    """A stacked linear layer. Its parts are requested one after another with the same input."""

    def __init__(self, linear: Linear) -> None:
        self.linear, self.sizes = linear, list(linear.parts.values())
        self._input: Tensor | None = None
        self._pieces: list[Tensor | None] = []

    def take(self, part: int, x: Tensor) -> Tensor:
        """One part of the product with ``x`` (..., in_features). The first request computes all parts."""
        if len(self.sizes) == 1:
            return self._product(x)
        if x is not self._input or self._pieces[part] is None:
            self._input, self._pieces = x, list(torch.split(self._product(x), self.sizes, dim=-1))
        piece, self._pieces[part] = self._pieces[part], None
        if all(left is None for left in self._pieces):
            self._input = None
        assert piece is not None
        return piece

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.reshape(x.shape[:-1].numel(), self.linear.in_features))
        return out.view(*x.shape[:-1], out.shape[-1])  # there may be no rows, and no inputs


class StackedPart(nn.Module):
    """Replaces a linear layer by a part of a stacked one. Has no ``weight``."""

    def __init__(self, stack: Stack, part: int) -> None:
        super().__init__()
        self._stack, self._part = stack, part
        self.in_features, self.out_features = stack.linear.in_features, stack.sizes[part]

    def forward(self, x: Tensor) -> Tensor:
        return self._stack.take(self._part, x)


class TransposedLinear(Linear):
    """A linear layer whose weight is stored as (in, out) in the checkpoint."""

    def targets(self, path: str) -> Iterator[tuple[str, Tensor]]:
        for name, target in super().targets(path):
            yield name, target.T if name.endswith(".weight") else target


def stack_linears(model: nn.Module, paths: Sequence[str]) -> None:
    """Replace linear layers of torch or GPT-2 at ``paths``, which have the same parent, by one stacked layer."""
    layers = [model.get_submodule(path) for path in paths]
    parent, names = paths[0].rpartition(".")[0], [path.rpartition(".")[2] for path in paths]
    shapes = [layer_shape(layer) for layer in layers]
    sizes = {name: out for name, (_, out) in zip(names, shapes, strict=True)}
    cls = TransposedLinear if isinstance(layers[0], Conv1D) else Head if names == [HEAD] else Linear
    stacked = cls(shapes[0][0], sizes, bias=layers[0].bias is not None)
    owner = model.get_submodule(parent)
    owner.add_module(f"{'_'.join(names)}_stacked", stacked)
    stack = Stack(stacked)
    for part, name in enumerate(names):
        owner.add_module(name, StackedPart(stack, part))


class SharedEmbedding(nn.Module):
    """Replaces an embedding by the rows of another layer. Multiplies them by ``scale``."""

    def __init__(self, rows: Callable[[Tensor], Tensor], scale: Tensor | None) -> None:
        super().__init__()
        self._rows, self._scale = rows, scale

    def forward(self, ids: Tensor) -> Tensor:
        """(1, tokens) -> (1, tokens, hidden)."""
        rows = self._rows(ids[0])[None]
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


class Expert(nn.Module):
    """One expert, whose linear layers have the checkpoint's names. ``gate``: (rows, 2 * inner) -> (rows, inner)."""

    def __init__(self, hidden: int, inner: int, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = gate
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=False)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate(self.gate_up_proj(x)))
        return out


class Experts(nn.ModuleList):
    """Replaces transformers' stacked experts: multiplies each expert separately, or all together.

    If they are ``grouped`` after loading, the modules of single experts are removed.
    """

    def __init__(self, count: int, hidden: int, inner: int, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Expert(hidden, inner, gate) for _ in range(count))
        self.gate = gate
        self.stacked: dict[str, Tensor] = {}
        self.grouped: GroupedExperts | None = None

    def stack(self) -> None:
        """Put the plain weights of all experts in one tensor, because checkpoints may store them in this form."""
        for name in ("gate_up_proj", "down_proj"):
            linears: list[Linear] = [getattr(expert, name) for expert in self]
            weights = [linear.weight for linear in linears if linear.weight is not None]
            if len(weights) == len(self):
                self.stacked[name] = weights[0].new_empty(len(self), *weights[0].shape)
                for linear, memory in zip(linears, self.stacked[name], strict=True):
                    linear.weight = nn.Parameter(memory, requires_grad=False)

    def freeze(self, kernels: KernelFactory) -> None:
        """Called once after loading, before single experts. These then create their kernels, or are removed."""
        if len(self.stacked) == 2:
            self.grouped = group_experts(self.stacked["gate_up_proj"], self.stacked["down_proj"], self.gate)
        if self.grouped is not None:
            del self[:]
        self.stacked = {}

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """``x`` (tokens, hidden), ``index`` and ``weights`` (tokens, chosen) -> (tokens, hidden)."""
        if self.grouped is not None:
            return self.grouped(x, index, weights)
        chosen = index.shape[-1]
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=len(self)).tolist()
        rows = x[order // chosen]
        out, end = torch.empty_like(rows), 0
        for expert, count in zip(self, counts, strict=True):
            if count:
                start, end = end, end + count
                out[start:end] = expert(rows[start:end])
        weighed = torch.empty_like(out)
        weighed[order] = out
        weighed = weighed.view(len(x), chosen, -1) * weights[..., None]
        return weighed.sum(1).to(x.dtype)


def split_experts(module: nn.Module) -> Experts:
    """Experts with the shapes of transformers' stacked experts.

    Raises UnservedError if they are not plain gated experts.
    """
    plain = getattr(module, "has_gate", False) and getattr(module, "is_concatenated", False)
    if not plain or any(getattr(module, name) for name in ("has_bias", "is_transposed", "has_post_expert_norm")):
        raise UnservedError("its experts have biases, a norm, or another layout of weights")
    count, hidden, inner = module.get_parameter("down_proj").shape
    gate: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
    return Experts(count, hidden, inner, gate)

"""Linear layers: the weights of one or several stacked checkpoint modules, multiplied by an exchangeable kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

LinearKernel = Callable[[Tensor], Tensor]
KernelFactory = Callable[[Tensor, Tensor | None], LinearKernel]


class Weighted(nn.Module):
    """A module that owns checkpoint weights."""

    def targets(self, own: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name relative to the parent, the memory to load it into); ``own`` is this module's name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{own}.{name}", parameter

    def freeze(self, kernels: KernelFactory) -> None:
        """Called once after loading: bring the weights into the form that the forward pass reads."""


class Linear(Weighted):
    """``x`` (tokens, in_features) -> (tokens, out_features).

    ``parts`` are the checkpoint modules that are stacked along the output, with their rows: q, k and v are one
    multiplication, and so are gate and up. After ``freeze`` the weights belong to the kernel alone.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.kernel: LinearKernel | None = None

    def targets(self, own: str) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for part, rows in self.parts.items():
            for name, parameter in self.named_parameters(recurse=False):
                yield f"{part}.{name}", parameter[start : start + rows]
            start += rows

    def freeze(self, kernels: KernelFactory) -> None:
        self.kernel = kernels(self.weight.data, None if self.bias is None else self.bias.data)
        del self.weight
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.kernel is not None, "a linear layer is used before its weights are loaded"
        return self.kernel(x)

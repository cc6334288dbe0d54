"""Layers that the decoders share, over a flattened (tokens, features) batch; they know nothing of pages or steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.models.linear import KernelFactory, Linear, Weighted
from raylm.models.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention is: sizes, ``scale`` of the scores, and what restricts them.

    ``sliding_window`` counts the tokens that a query sees, itself included. ``softcap`` bounds scores by
    ``softcap * tanh(score / softcap)``.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class Attend(Protocol):
    """Attention over each token's own sequence, past included; whoever runs the model provides it.

    ``q`` (tokens, num_heads, head_dim), ``k`` and ``v`` (tokens, num_kv_heads, head_dim) -> as ``q``.
    """

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RMSNorm(Weighted):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(Weighted):
    """Qwen3's norm of every query and key head, both at once: (tokens, num_heads + num_kv_heads, head_dim)."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(2, head_dim), requires_grad=False)

    def targets(self, own: str) -> Iterator[tuple[str, Tensor]]:
        yield "q_norm.weight", self.weight[0]
        yield "k_norm.weight", self.weight[1]

    def freeze(self, kernels: KernelFactory) -> None:
        rows = torch.repeat_interleave(self.weight, torch.tensor(self.heads, device=self.weight.device), dim=0)
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


class Embedding(Weighted):
    """Token ids (tokens,) -> (tokens, size); ``rows`` looks them up where another layer holds the same weights."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(count, size), requires_grad=False)
        self.rows: Callable[[Tensor], Tensor] | None = None

    def share(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Give up the own weights."""
        self.weight, self.rows = None, rows

    def forward(self, ids: Tensor) -> Tensor:
        if self.rows is not None:
            return self.rows(ids)
        assert self.weight is not None
        return F.embedding(ids, self.weight)


class VocabParallelEmbedding(Embedding):
    """Holds the rows of the token ids ``part``; what other ``ranks`` hold comes from them."""

    def __init__(self, part: range, size: int, ranks: Ranks) -> None:
        super().__init__(len(part), size)
        self.part = part
        self.ranks = ranks

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.part.start
        foreign = (local < 0) | (local >= len(self.part))
        rows = super().forward(local.masked_fill(foreign, 0))
        return self.ranks.all_reduce(rows.masked_fill(foreign[:, None], 0))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up as one multiplication; ``inner`` is this rank's share."""

    def __init__(
        self, hidden: int, inner: int, act: Callable[[Tensor], Tensor], *, bias: bool, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.act = act
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias=bias and ranks.rank == 0)
        self.all_reduce = ranks.all_reduce

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.all_reduce(self.down_proj(self.act(gate) * up))

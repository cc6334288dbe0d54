"""The modules of the Llama families' decoder, over a flattened (tokens, features) batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.models.causal_lm import Attend, AttentionSpec
from raylm.models.decoder_config import DecoderConfig, Rope
from raylm.models.linear import KernelFactory, Linear, Weighted, prefix_of, unfilled

Angles = tuple[Tensor, Tensor]


class Rotary:
    """Rotary position embeddings (Su et al. 2021)."""

    def __init__(self, rope: Rope, device: torch.device, dtype: torch.dtype) -> None:
        self.inv_freq, self.scaling, self.dtype = rope.inv_freq.to(device), rope.scaling, dtype

    def __call__(self, positions: Tensor) -> Angles:
        """Cosine and sine, each (tokens, 1, head_dim / 2), of ``positions`` (tokens,)."""
        angles = (positions[:, None].float() * self.inv_freq)[:, None, :]
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the halves of the heads of ``x`` (tokens, heads, head_dim), in four operations: a graph pays for each."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_left, out_right = rotated.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return rotated


class RMSNorm(Weighted):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, unfilled(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(Weighted):
    """Qwen3's norm of every query and key head, both at once: (tokens, num_heads + num_kv_heads, head_dim)."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = (num_heads, num_kv_heads), eps
        self.weight = unfilled(2, head_dim)

    def targets(self, path: str) -> Iterator[tuple[str, Tensor]]:
        for name, weight in zip(("q_norm", "k_norm"), self.weight, strict=True):
            yield f"{prefix_of(path)}{name}.weight", weight

    def freeze(self, kernels: KernelFactory) -> None:
        rows = torch.repeat_interleave(self.weight, torch.tensor(self.heads, device=self.weight.device), dim=0)
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


class Embedding(Weighted):
    """(tokens,) -> (tokens, hidden_size); ``rows`` looks them up where another layer holds the same weights."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = unfilled(len(c.vocab), c.hidden_size)
        self.rows: Callable[[Tensor], Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.rows is not None:
            return self.rows(ids)
        assert self.weight is not None
        return F.embedding(ids, self.weight)


class VocabParallelEmbedding(Embedding):
    """Holds the rows of this rank's part of the vocabulary; the others come from the other ranks."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        self.vocab, self.all_reduce = c.vocab, c.ranks.all_reduce

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.vocab.start
        foreign = (local < 0) | (local >= len(self.vocab))
        rows = super().forward(local.masked_fill(foreign, 0))
        return self.all_reduce(rows.masked_fill(foreign[:, None], 0))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up as one multiplication."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        inner, bias = c.intermediate_size, c.biases.mlp
        self.act = c.activation
        self.gate_up_proj = Linear(c.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = Linear(inner, {"down_proj": c.hidden_size}, bias=bias and c.ranks.rank == 0)
        self.all_reduce = c.ranks.all_reduce

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.all_reduce(self.down_proj(self.act(gate) * up))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.spec = spec
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=c.biases.qkv)
        self.o_proj = Linear(q, {"o_proj": c.hidden_size}, bias=c.biases.output and c.ranks.rank == 0)
        self.all_reduce = c.ranks.all_reduce
        self.qk_norm: nn.Module = nn.Identity()
        if c.qk_norm:
            self.qk_norm = HeadNorm(c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv_proj(x).view(-1, heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        qk = rotate(self.qk_norm(qk), angles)
        return self.all_reduce(self.o_proj(attend(self.spec, qk[:, :heads], qk[:, heads:], v).flatten(1)))


class DecoderLayer(nn.Module):
    """Attention, then the gated MLP, each on the normed input and added to it."""

    def __init__(self, c: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, spec)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: DecoderConfig, specs: list[AttentionSpec]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config) if config.ranks.world_size > 1 else Embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, spec) for spec in specs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, angles, attend)
        normed: Tensor = self.norm(x)
        return normed

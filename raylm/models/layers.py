"""Modules of the Llama families' decoder, for a flattened (tokens, features) batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.models.causal_lm import Attend, AttentionSpec
from raylm.models.decoder_config import DecoderConfig, Rope
from raylm.models.elementwise import TORCH, Angles, Elementwise, HeadWeights
from raylm.models.linear import KernelFactory, Linear, Weighted, prefix_of, unfilled
from raylm.models.pipeline import has_embedding


class Rotary:
    """Rotary position embeddings (Su et al. 2021)."""

    def __init__(self, rope: Rope, device: torch.device, dtype: torch.dtype) -> None:
        self.inv_freq, self.scaling, self.dtype = rope.inv_freq.to(device), rope.scaling, dtype

    def __call__(self, positions: Tensor) -> Angles:
        """Cosine and sine, each (tokens, 1, head_dim / 2), of ``positions`` (tokens,)."""
        angles = (positions[:, None].float() * self.inv_freq)[:, None, :]
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


class RMSNorm(Weighted):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, unfilled(size)
        self.elementwise: Elementwise = TORCH

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + delta`` and its norm. May overwrite ``x``."""
        return self.elementwise.add_rms_norm(x, delta, self.weight, self.eps)


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

    @property
    def weights(self) -> HeadWeights:
        return HeadWeights(self.weight, self.eps)


class Embedding(Weighted):
    """(tokens,) -> (tokens, hidden_size). If another layer has the same weights, ``rows`` looks them up there."""

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
    """Has this rank's part of the vocabulary. A sum over ranks adds the other rows."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        self.vocab, self.all_reduce = c.vocab, c.ranks.all_reduce

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.vocab.start
        foreign = (local < 0) | (local >= len(self.vocab))
        rows = super().forward(local.masked_fill(foreign, 0))
        return self.all_reduce(rows.masked_fill(foreign[:, None], 0))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one multiplication."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        inner, bias = c.intermediate_size, c.biases.mlp
        self.act = c.activation
        self.gate_up_proj = Linear(c.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = Linear(inner, {"down_proj": c.hidden_size}, bias=bias and c.ranks.rank == 0)
        self.all_reduce = c.ranks.all_reduce
        self.elementwise: Elementwise = TORCH

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(self.down_proj(self._gated(self.gate_up_proj(x))))

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.act is F.silu:
            return self.elementwise.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act(gate) * up


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.spec = spec
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=c.biases.qkv)
        self.o_proj = Linear(q, {"o_proj": c.hidden_size}, bias=c.biases.output and c.ranks.rank == 0)
        self.all_reduce = c.ranks.all_reduce
        self.elementwise: Elementwise = TORCH
        self.qk_norm: HeadNorm | None = None
        if c.qk_norm:
            self.qk_norm = HeadNorm(c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).view(-1, self.spec.num_heads + 2 * self.spec.num_kv_heads, self.spec.head_dim)
        norm = None if self.qk_norm is None else self.qk_norm.weights
        return self.all_reduce(self.o_proj(self._attended(qkv, angles, norm, attend).flatten(1)))

    def _attended(self, qkv: Tensor, angles: Angles, norm: HeadWeights | None, attend: Attend) -> Tensor:
        places = attend.places(self.spec)
        if places is not None:
            return attend(self.spec, self.elementwise.rotate_and_write(qkv, angles, norm, places))
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qk = self.elementwise.rotate(qkv[:, : heads + kv_heads], angles, norm)
        return attend(self.spec, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :])


class DecoderLayer(nn.Module):
    """Attention, then the gated MLP, each with a norm of its input. The next norm adds their outputs to the input."""

    def __init__(self, c: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, spec)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, delta: Tensor | None, angles: Angles, attend: Attend) -> tuple[Tensor, Tensor]:
        """``delta`` must still be added to ``x``; the same holds for the result."""
        x, normed = self.input_layernorm(x, delta)
        x, normed = self.post_attention_layernorm(x, self.self_attn(normed, angles, attend))
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """Embedding, layers, last norm; or those of them that a stage has. Layers have their number in the whole model."""

    def __init__(self, config: DecoderConfig, specs: list[AttentionSpec]) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = None
        if has_embedding(config):
            self.embed_tokens = VocabParallelEmbedding(config) if config.ranks.world_size > 1 else Embedding(config)
        self.layers = nn.ModuleList()
        for number, spec in zip(config.layers, specs, strict=True):
            self.layers.add_module(str(number), DecoderLayer(config, spec))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if config.ranks.stage.is_last else None

    def forward(self, input_ids: Tensor, angles: Angles, attend: Attend, stream: Tensor | None = None) -> Tensor:
        """``stream`` (2, tokens, hidden_size) is the result of the stage before: the stream, and what to add to it.

        Returns hidden states (tokens, hidden_size) after the last norm, or else such a ``stream``.
        """
        x: Tensor
        delta: Tensor | None
        if stream is None:
            assert self.embed_tokens is not None, "a stage begins with the stream of the stage before"
            x, delta = self.embed_tokens(input_ids), None
        else:
            x, delta = stream.unbind()
        for layer in self.layers:
            x, delta = layer(x, delta, angles, attend)
        if self.norm is None:
            assert delta is not None
            return torch.stack((x, delta))
        normed: Tensor = self.norm(x, delta)[1]
        return normed

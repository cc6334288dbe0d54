"""The compact decoder of the Llama, Qwen2, Qwen3 and Mistral families, over one flattened batch of tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.models.causal_lm import CausalLM
from raylm.models.decoder_config import DecoderConfig, decoder_config, layer_windows
from raylm.models.fields import Fields
from raylm.models.layers import Attend, AttentionSpec, GatedMLP, HeadNorm, RMSNorm
from raylm.models.linear import Head, KernelFactory, Linear, Weighted
from raylm.models.native_decoder import native_decoder, refusals
from raylm.models.ranks import Ranks
from raylm.models.rope import Rotary, rotate
from raylm.models.tensor_parallel import embedding, others_names, shards, share
from raylm.native import NativeDecoder, NativeLinear

logger = logging.getLogger(__name__)

Angles = tuple[Tensor, Tensor]

# What transformers assumes of entries that a config.json leaves out.
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        c = config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.spec = spec
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=c.qkv_bias)
        self.o_proj = Linear(q, {"o_proj": c.hidden_size}, bias=c.output_bias and c.ranks.rank == 0)
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

    def __init__(self, config: DecoderConfig, spec: AttentionSpec) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, spec)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.activation, bias=c.mlp_bias, ranks=c.ranks)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: DecoderConfig, specs: list[AttentionSpec]) -> None:
        super().__init__()
        self.embed_tokens = embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, spec) for spec in specs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, angles, attend)
        normed: Tensor = self.norm(x)
        return normed


class LlamaForCausalLM(CausalLM):
    """A decoder with its language-model head; the other families differ by a few switches of its configuration."""

    adaptable = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.vocab_widths = config.ranks.widths(config.vocab_size)
        self.attention_specs = _attention_specs(config)
        self.model = Decoder(config, self.attention_specs)
        self.lm_head = Head(config.hidden_size, {"lm_head": len(config.vocab)}, bias=False)
        self.rotary: Rotary | None = None
        self.dtype = torch.float32

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> LlamaForCausalLM:
        whole = cls.configure(checkpoint)
        model = cls(share(whole, ranks))
        model.shards = shards(whole, ranks, model.targets())
        return model

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        """Read config.json with the defaults of this family."""
        fields = Fields(checkpoint, {**_DEFAULTS, "attention_bias": False, "mlp_bias": False})
        windows = (None,) * fields.size("num_hidden_layers")
        bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
        return decoder_config(fields, windows, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)

    def targets(self) -> dict[str, Tensor]:
        return {name: target for name, target in self._weights() if name not in self.redundant}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self.named_modules():
            if isinstance(module, Weighted):
                parent, _, own = path.rpartition(".")
                for name, target in module.targets(own):
                    yield f"{parent}.{name}" if parent else name, target

    @property
    def redundant(self) -> frozenset[str]:
        return frozenset({"lm_head.weight"} if self.config.tied else ()) | others_names(self.config)

    def freeze(self, kernels: KernelFactory) -> None:
        weight = self.model.embed_tokens.weight
        assert weight is not None, "the model is frozen twice"
        self.dtype = weight.dtype
        if self.config.tied:
            self.lm_head.weight = weight
        self.rotary = Rotary(self.config.inv_freq.to(weight.device), self.config.rope_scaling, weight.dtype)
        for module in self.modules():
            if isinstance(module, Weighted):
                module.freeze(kernels)
        head = self.lm_head.kernel
        if self.config.tied and isinstance(head, NativeLinear) and head.dtype is not None:
            self.model.embed_tokens.share(head.rows)

    def native_decoder(self, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        if not isinstance(self.lm_head.kernel, NativeLinear) or self.config.ranks.size > 1:
            return None  # the walk is one call, in which no rank could wait for the others
        if reasons := refusals(self.config, self.dtype):
            logger.warning("The model runs layer by layer, and slower: %s", ", ".join(reasons))
            return None
        return native_decoder(self, max_tokens, kv_caches)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert self.rotary is not None, "the model is used before its weights are loaded"
        hidden: Tensor = self.model(input_ids, self.rotary(positions), attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.config.ranks.gather(self.lm_head(hidden), self.vocab_widths).float()


def _attention_specs(c: DecoderConfig) -> list[AttentionSpec]:
    scale = c.head_dim**-0.5
    return [
        AttentionSpec(layer, c.num_heads, c.num_kv_heads, c.head_dim, scale, sliding_window=window)
        for layer, window in enumerate(c.windows)
    ]


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Biases on q, k and v; some layers may slide."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields(checkpoint, _QWEN_DEFAULTS)
        return decoder_config(fields, layer_windows(fields), qkv_bias=True)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """A norm on every query and key head; some layers may slide."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields(checkpoint, {**_QWEN_DEFAULTS, "attention_bias": False, "head_dim": 128})
        bias = fields.flag("attention_bias")
        return decoder_config(fields, layer_windows(fields), qkv_bias=bias, output_bias=bias, qk_norm=True)


class MistralForCausalLM(LlamaForCausalLM):
    """No biases; all layers slide where the configuration says so, or says nothing."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields(checkpoint, {**_DEFAULTS, "sliding_window": 4096, "num_key_value_heads": 8})
        window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
        return decoder_config(fields, (window,) * fields.size("num_hidden_layers"))

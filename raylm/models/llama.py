"""The Llama, Qwen2, Qwen3 and Mistral families: one decoder, configured by config.json."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.models.causal_lm import Attend, AttentionSpec, CausalLM
from raylm.models.config_fields import Fields
from raylm.models.decoder_config import Biases, DecoderConfig, decoder_config, layer_windows, listed_windows
from raylm.models.elementwise import select_elementwise
from raylm.models.layers import Attention, Decoder, GatedMLP, RMSNorm, Rotary
from raylm.models.linear import Head, KernelFactory, Weighted, linear_layers
from raylm.models.native_decoder import native_decoder
from raylm.models.pipeline import is_elsewhere, place
from raylm.models.ranks import Ranks
from raylm.models.tensor_parallel import others_names, shards, share
from raylm.native import NativeDecoder, NativeLinear


class LlamaForCausalLM(CausalLM):
    """A decoder with a language-model head. The other families differ only in its configuration."""

    adaptable = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.vocab_widths = config.ranks.widths(config.vocab_size)
        self.attention_specs = [
            AttentionSpec(layer, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, window)
            for layer, window in enumerate(config.windows[config.layers.start : config.layers.stop])
        ]
        self.model = Decoder(config, self.attention_specs)
        self.lm_head: Head | None = None
        if config.ranks.stage.is_last:
            self.lm_head = Head(config.hidden_size, {"lm_head": len(config.vocab)}, bias=False)
        self.rotary: Rotary | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> LlamaForCausalLM:
        whole = place(cls.configure(checkpoint), ranks.stage)
        model = cls(share(whole, ranks))
        model.shards = shards(whole, ranks, model.targets())
        return model

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        """config.json with the defaults of this family. Raises ConfigError if it is not supported."""
        fields = Fields.of("LlamaForCausalLM", checkpoint)
        windows = (None,) * fields.size("num_hidden_layers")
        bias = fields.flag("attention_bias")
        return decoder_config(fields, windows, Biases(qkv=bias, output=bias, mlp=fields.flag("mlp_bias")))

    @property
    def redundant(self) -> frozenset[str]:
        return frozenset({"lm_head.weight"} if self.config.tied else ()) | others_names(self.config)

    @property
    def embedding(self) -> Tensor | None:
        return None if self.model.embed_tokens is None else self.model.embed_tokens.weight

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_elsewhere(name, self.config)

    def freeze(self, kernels: KernelFactory) -> None:
        assert self.rotary is None, "the model is frozen twice"
        embedding, tied = self.model.embed_tokens, self.config.tied
        if tied and self.lm_head is not None and embedding is not None:
            self.lm_head.weight = embedding.weight
        weight = next(self.parameters())
        self.rotary = Rotary(self.config.rope, weight.device, weight.dtype)
        elementwise = select_elementwise(weight.device)
        for module in self.modules():
            if isinstance(module, Weighted):
                module.freeze(kernels)
            if isinstance(module, (RMSNorm, GatedMLP, Attention)):
                module.elementwise = elementwise
        head = None if self.lm_head is None else self.lm_head.kernel
        if tied and embedding is not None and isinstance(head, NativeLinear) and head.dtype is not None:
            embedding.weight, embedding.rows = None, head.rows

    def native_decoder(self, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        linear = next(module for _, module in linear_layers(self))
        if not isinstance(linear.kernel, NativeLinear) or self.config.ranks.world_size > 1:
            return None  # ranks cannot exchange results within one native call
        return native_decoder(self.config, self.model, self.lm_head, max_tokens, kv_caches)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, stream: Tensor | None = None) -> Tensor:
        """As in CausalLM. A stage begins with the ``stream`` of the stage before and returns one for the next stage."""
        assert self.rotary is not None, "the model is used before its weights are loaded"
        hidden: Tensor = self.model(input_ids, self.rotary(positions), attend, stream)
        return hidden

    def empty_stream(self, tokens: int) -> Tensor:
        return torch.empty((2, tokens, self.config.hidden_size), dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None, "only the last stage has the head"
        return self.config.ranks.gather(self.lm_head(hidden), self.vocab_widths).float()


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Has biases on q, k and v. Some layers may have sliding windows."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields.of("Qwen2ForCausalLM", checkpoint)
        return decoder_config(fields, layer_windows(fields), Biases(qkv=True))


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Has a norm on every query and key head. Some layers may have sliding windows."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields.of("Qwen3ForCausalLM", checkpoint)
        bias = fields.flag("attention_bias")
        return decoder_config(fields, layer_windows(fields), Biases(qkv=bias, output=bias), qk_norm=True)


class MistralForCausalLM(LlamaForCausalLM):
    """Has no biases. All layers have sliding windows, or the layers that layer_types names (Ministral)."""

    @classmethod
    def configure(cls, checkpoint: Checkpoint) -> DecoderConfig:
        fields = Fields.of("MistralForCausalLM", checkpoint)
        window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
        if fields.get("layer_types") is not None:
            return decoder_config(fields, listed_windows(fields, window, "sliding_window"), Biases())
        return decoder_config(fields, (window,) * fields.size("num_hidden_layers"), Biases())

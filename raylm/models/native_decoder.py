"""native_decoder: passes a loaded decoder of the Llama families to the native kernels, which run it in one call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from raylm.models.causal_lm import AttentionSpec
from raylm.models.decoder_config import DecoderConfig
from raylm.models.layers import Decoder, DecoderLayer, HeadNorm
from raylm.models.linear import Linear
from raylm.native import NativeDecoder, NativeLinear
from raylm.native import library as layout
from raylm.stages import about

logger = logging.getLogger(__name__)


def native_decoder(
    config: DecoderConfig, decoder: Decoder, head: Linear | None, max_tokens: int, kv_caches: Sequence[Tensor]
) -> NativeDecoder | None:
    """A loaded ``decoder`` with native linear layers as one call.

    None, with a warning, if the kernels do not support it.
    """
    if reasons := list(_refusals(config)):
        logger.warning("The model runs layer by layer, and slower: %s", ", ".join(reasons), extra=about("slower"))
        return None
    modules = cast("list[DecoderLayer]", list(decoder.layers))
    dtype = modules[0].input_layernorm.weight.dtype
    embedding = None if decoder.embed_tokens is None else decoder.embed_tokens.weight
    norm = None if decoder.norm is None else _floats(decoder.norm.weight)
    inv_freq = config.rope.inv_freq.float().contiguous()
    kept = [inv_freq, *([] if norm is None else [norm])]
    layers = (layout.Layer * len(modules))(*(_layer(module, kept) for module in modules))
    struct = layout.Model(
        layers=len(modules),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        max_tokens=max_tokens,
        heads=heads_struct(modules[0].self_attn.spec),
        eps=config.norm_eps,
        rope_scaling=config.rope.scaling,
        inv_freq=inv_freq.data_ptr(),
        last_norm=None if norm is None else norm.data_ptr(),
        embedding=None if embedding is None else embedding.data_ptr(),
        head=layout.LinearStruct() if head is None else _packed(head),
        layer=layers,
    )
    struct.kept = (kept, layers, decoder, head)  # keeps the memory that it points to alive
    return NativeDecoder(struct, kv_caches, dtype, config.vocab_size)


def _refusals(config: DecoderConfig) -> Iterator[str]:
    """Reasons why the kernels do not support the decoder, besides those of attention."""
    if config.activation is not F.silu:
        yield "its activation is not silu"
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size % layout.LANES:
            yield f"its {name} of {size} is not a multiple of {layout.LANES}"
    if config.head_dim > 512:
        yield f"its head_dim of {config.head_dim} exceeds 512"


def heads_struct(spec: AttentionSpec) -> layout.Heads:
    window, softcap = spec.sliding_window or 0, spec.softcap or 0.0
    return layout.Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, window, spec.scale, softcap)


def _layer(layer: DecoderLayer, kept: list[Tensor]) -> layout.Layer:
    """Append the tensors that the struct points to, to ``kept``."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = [_floats(layer.input_layernorm.weight), _floats(layer.post_attention_layernorm.weight)]
    if isinstance(attention.qk_norm, HeadNorm):
        weight = attention.qk_norm.weight
        norms += [_floats(weight[0]), _floats(weight[attention.spec.num_heads])]
    kept += norms
    return layout.Layer(
        _packed(attention.qkv_proj),
        _packed(attention.o_proj),
        _packed(mlp.gate_up_proj),
        _packed(mlp.down_proj),
        *(norm.data_ptr() for norm in norms),
        window=attention.spec.sliding_window or 0,
    )


def _packed(linear: Linear) -> layout.LinearStruct:
    assert isinstance(linear.kernel, NativeLinear), "the model was not loaded with native linear layers"
    return linear.kernel.struct


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()

"""Hands a loaded decoder of the Llama families to the native kernels, which then walk all its layers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.models.decoder_config import DecoderConfig
from raylm.models.layers import AttentionSpec, HeadNorm
from raylm.models.linear import Linear
from raylm.native import NativeDecoder, NativeLinear, kernels, layout

if TYPE_CHECKING:
    from raylm.models.llama import DecoderLayer, LlamaForCausalLM


def refusals(config: DecoderConfig, dtype: torch.dtype) -> list[str]:
    """Why a decoder cannot be walked natively; empty if it can."""
    found = []
    if dtype not in (torch.float32, torch.bfloat16):
        found.append(f"its dtype is {dtype}")
    if config.activation is not F.silu:
        found.append("its activation is not silu")
    if config.head_dim % layout.LANES:
        found.append(f"its head_dim of {config.head_dim} is no multiple of {layout.LANES}")
    if config.head_dim > 512:
        found.append(f"its head_dim of {config.head_dim} exceeds 512")
    if config.intermediate_size % layout.LANES:
        found.append(f"its intermediate_size of {config.intermediate_size} is no multiple of {layout.LANES}")
    return found


def native_decoder(model: LlamaForCausalLM, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder:
    """The native walk over a loaded ``model`` with native linear layers; steps have up to ``max_tokens``."""
    c, specs = model.config, model.attention_specs
    embedding = model.model.embed_tokens.weight
    kept = [c.inv_freq.float().contiguous(), _floats(model.model.norm.weight)]
    modules = cast("list[DecoderLayer]", list(model.model.layers))
    layers = (layout.Layer * c.num_layers)(*(_layer(*pair, kept) for pair in zip(modules, specs, strict=True)))
    struct = layout.Model(
        layers=c.num_layers,
        hidden=c.hidden_size,
        inner=c.intermediate_size,
        max_tokens=max_tokens,
        heads=heads_struct(specs[0]),
        eps=c.norm_eps,
        rope_scaling=c.rope_scaling,
        inv_freq=kept[0].data_ptr(),
        last_norm=kept[1].data_ptr(),
        embedding=None if embedding is None else embedding.data_ptr(),
        head=_packed(model.lm_head),
        layer=layers,
    )
    return NativeDecoder(kernels(), struct, kv_caches, model.dtype, c.vocab_size, (kept, layers, model))


def heads_struct(spec: AttentionSpec) -> layout.Heads:
    """What a layer's attention is, as the kernels read it."""
    return layout.Heads(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )


def _layer(layer: DecoderLayer, spec: AttentionSpec, kept: list[Tensor]) -> layout.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [_floats(layer.input_layernorm.weight), _floats(layer.post_attention_layernorm.weight)]
    if isinstance(attention.qk_norm, HeadNorm):
        weight = attention.qk_norm.weight
        norms += [_floats(weight[0]), _floats(weight[spec.num_heads])]
    kept += norms
    pointers = [norm.data_ptr() for norm in norms] + [None] * (4 - len(norms))
    return layout.Layer(
        qkv=_packed(attention.qkv_proj),
        output=_packed(attention.o_proj),
        gate_up=_packed(mlp.gate_up_proj),
        down=_packed(mlp.down_proj),
        input_norm=pointers[0],
        post_norm=pointers[1],
        query_norm=pointers[2],
        key_norm=pointers[3],
        window=spec.sliding_window or 0,
    )


def _packed(linear: Linear) -> layout.Linear:
    assert isinstance(linear.kernel, NativeLinear), "the model was not loaded with native linear layers"
    return linear.kernel.packed.struct


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()

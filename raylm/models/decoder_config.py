"""DecoderConfig: what config.json says about a decoder, checked and in our own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.rope import frequencies

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """Sizes, switches and rotary frequencies of one decoder.

    ``windows`` has one entry a layer: the tokens that a query of that layer sees, None for all. ``inv_freq``
    (head_dim / 2,) and ``rope_scaling`` describe the rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tied: bool
    windows: tuple[int | None, ...]
    inv_freq: Tensor
    rope_scaling: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


def decoder_config(hf: Any, windows: tuple[int | None, ...], **switches: bool) -> DecoderConfig:
    """Translate a transformers configuration; ``switches`` are the biases and norms of its family.

    Raises:
        ConfigError: a value that is not supported, named.
    """
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({hf.num_attention_heads}) is no multiple of "
            f"num_key_value_heads ({hf.num_key_value_heads})."
        )
    if hf.hidden_act not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act {hf.hidden_act!r} is not supported; supported: {', '.join(_ACTIVATIONS)}."
        )
    inv_freq, rope_scaling = frequencies(hf, head_dim)
    return DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=hf.rms_norm_eps,
        activation=_ACTIVATIONS[hf.hidden_act],
        tied=bool(hf.tie_word_embeddings),
        windows=windows,
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        **switches,
    )

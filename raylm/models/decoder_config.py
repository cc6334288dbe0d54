"""DecoderConfig: what config.json says about a decoder, checked and in our own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from raylm.models.fields import Fields
from raylm.models.ranks import ALONE, Ranks
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
    (head_dim / 2,) and ``rope_scaling`` describe the rotary embedding. Where several ``ranks`` share the decoder, heads
    and ``intermediate_size`` are those of this one; see tensor_parallel.py.
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
    ranks: Ranks = ALONE

    @property
    def vocab(self) -> range:
        """The token ids whose embeddings, and whose rows of the head, lie here."""
        return self.ranks.part(self.vocab_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


def decoder_config(fields: Fields, windows: tuple[int | None, ...], **switches: bool) -> DecoderConfig:
    """Read a configuration; ``switches`` are the biases and norms of its family.

    Raises:
        ConfigError: an entry that is missing, wrong or not supported, named.
    """
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", fallback="num_attention_heads")
    if heads % kv_heads:
        raise fields.error("num_attention_heads", heads, f"a multiple of num_key_value_heads ({kv_heads})")
    head_dim = fields.size("hidden_size") // heads if fields.get("head_dim") is None else fields.size("head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "even, for the rotary embedding")
    act = fields.get("hidden_act")
    if act not in _ACTIVATIONS:
        raise fields.error("hidden_act", act, f"one of {', '.join(_ACTIVATIONS)}, which are supported")
    inv_freq, rope_scaling = frequencies(fields, head_dim)
    return DecoderConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        activation=_ACTIVATIONS[act],
        tied=fields.flag("tie_word_embeddings"),
        windows=windows,
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        ranks=ALONE,
        **switches,
    )


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """The windows of families in which only some layers slide, or none.

    Raises:
        ConfigError: a kind of layer that is not supported.
    """
    layers = fields.size("num_hidden_layers")
    window = fields.size("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = layers if window is None else fields.size("max_window_layers", least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", kinds, f"{layers} of full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise fields.error("use_sliding_window", False, "true where layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

"""Tensor parallelism of the Llama families: what each rank holds of the layers (Shoeybi et al. 2019, Megatron-LM).

Column-wise layers (q, k, v, gate, up) have a share of the outputs on each rank, row-wise ones (o, down) take that share
as their input; the sums of what these give, one after the attention and one after the MLP, are all that ranks exchange
in a layer. Embedding and head are split by vocabulary: whole on every rank, they would be what a rank reads most in a
small model with a large vocabulary, and cost one sum and one gathering a step to split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from raylm.errors import ConfigError
from raylm.models.causal_lm import Shard
from raylm.models.decoder_config import DecoderConfig
from raylm.models.ranks import Ranks

Style = Literal["colwise", "rowwise"]

# Module -> how it is split, as in base_model_tp_plan of transformers, and which entry of DecoderConfig is divided.
PLAN: dict[str, tuple[Style, str]] = {
    "q_proj": ("colwise", "num_heads"),
    "k_proj": ("colwise", "num_kv_heads"),
    "v_proj": ("colwise", "num_kv_heads"),
    "o_proj": ("rowwise", "num_heads"),
    "gate_proj": ("colwise", "intermediate_size"),
    "up_proj": ("colwise", "intermediate_size"),
    "down_proj": ("rowwise", "intermediate_size"),
    "embed_tokens": ("colwise", "vocab_size"),
    "lm_head": ("colwise", "vocab_size"),
}
_DIM: dict[Style, int] = {"colwise": 0, "rowwise": 1}
_KNOB = "engine.tensor_parallel_size"


def share(whole: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """One rank's part of a decoder; with more ranks than KV heads, neighbouring ranks hold the same one.

    Raises:
        ConfigError: the decoder cannot be divided by so many.
    """
    for name, count in (("attention heads", whole.num_heads), ("inputs of down_proj", whole.intermediate_size)):
        if count % ranks.world_size:
            raise ConfigError(f"{_KNOB}: {ranks.world_size} ranks cannot share {count} {name} evenly.")
    if whole.num_kv_heads % ranks.world_size and ranks.world_size % whole.num_kv_heads:
        raise ConfigError(
            f"{_KNOB}: {ranks.world_size} ranks can neither share nor repeat {whole.num_kv_heads} KV heads."
        )
    if whole.vocab_size < ranks.world_size:
        raise ConfigError(f"{_KNOB}: {ranks.world_size} ranks cannot share a vocabulary of {whole.vocab_size}.")
    return replace(
        whole,
        num_heads=whole.num_heads // ranks.world_size,
        num_kv_heads=len(_kv_heads(whole, ranks)),
        intermediate_size=whole.intermediate_size // ranks.world_size,
        ranks=ranks,
    )


def shards(whole: DecoderConfig, ranks: Ranks, names: Iterable[str]) -> dict[str, Shard]:
    """Which part of the checkpoint's tensors ``names`` this rank holds; those that it holds whole are left out."""
    d = whole.head_dim
    heads, kv_heads = ranks.part(whole.num_heads), _kv_heads(whole, ranks)
    parts = {
        "num_heads": (range(heads.start * d, heads.stop * d), whole.num_heads * d),
        "num_kv_heads": (range(kv_heads.start * d, kv_heads.stop * d), whole.num_kv_heads * d),
        "intermediate_size": (ranks.part(whole.intermediate_size), whole.intermediate_size),
        "vocab_size": (ranks.part(whole.vocab_size), whole.vocab_size),
    }
    found = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        style, divided = PLAN.get(module.rpartition(".")[2], (None, ""))
        if style is None or (style == "rowwise" and kind == "bias"):
            continue
        part, count = parts[divided]
        if len(part) < count:
            found[name] = Shard(_DIM[style], part, count)
    return found


def others_names(config: DecoderConfig) -> set[str]:
    """Tensors that only rank 0 holds: what is added after the sum over ranks is added once."""
    layers = range(len(config.windows) if config.ranks.rank else 0)
    biases = {"self_attn.o_proj": config.biases.output, "mlp.down_proj": config.biases.mlp}
    return {f"model.layers.{i}.{module}.bias" for i in layers for module, has in biases.items() if has}


def _kv_heads(whole: DecoderConfig, ranks: Ranks) -> range:
    if ranks.world_size <= whole.num_kv_heads:
        return ranks.part(whole.num_kv_heads)
    first = ranks.rank * whole.num_kv_heads // ranks.world_size
    return range(first, first + 1)

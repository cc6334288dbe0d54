"""Tensor parallelism of the Llama families: what each rank holds of the layers (Shoeybi et al. 2019, Megatron-LM).

Column-wise layers (q, k, v, gate, up) have a share of the outputs on each rank, row-wise ones (o, down) take that share
as their input; ranks exchange only the sums of what these give, two a layer. Embedding and head, most of what a small
model reads, are split by vocabulary, which costs one sum and one gathering a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from raylm.errors import ConfigError
from raylm.models.causal_lm import Shard
from raylm.models.decoder_config import DecoderConfig
from raylm.models.ranks import Ranks

# Module -> how it is split, as in base_model_tp_plan of transformers, and which entry of DecoderConfig is divided.
PLAN = {
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
_KNOB = "engine.tensor_parallel_size"


def share(whole: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """One rank's part, or ConfigError; with more ranks than KV heads, neighbouring ranks hold the same one."""
    size = ranks.world_size
    for name, count in (("attention heads", whole.num_heads), ("inputs of down_proj", whole.intermediate_size)):
        if count % size:
            raise ConfigError(f"{_KNOB}: {size} ranks cannot share {count} {name} evenly.")
    if whole.num_kv_heads % size and size % whole.num_kv_heads:
        raise ConfigError(f"{_KNOB}: {size} ranks can neither share nor repeat {whole.num_kv_heads} KV heads.")
    if whole.vocab_size < size:
        raise ConfigError(f"{_KNOB}: {size} ranks cannot share a vocabulary of {whole.vocab_size}.")
    heads, kv_heads, inner = whole.num_heads // size, len(_kv_heads(whole, ranks)), whole.intermediate_size // size
    return replace(whole, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, ranks=ranks)


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
        style, divided = PLAN.get(module.rpartition(".")[2], ("", ""))
        if not style or (style == "rowwise" and kind == "bias"):
            continue
        part, count = parts[divided]
        if len(part) < count:
            found[name] = Shard(0 if style == "colwise" else 1, part, count)
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

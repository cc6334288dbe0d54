"""Converts the metadata of a GGUF file to the entries of a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from raylm.errors import ConfigError
from raylm.gguf.reader import FileMetadata
from raylm.gguf.stored import StoredTensor

HEAD, ROPE_FACTORS = "output.weight", "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
# Entries of rope.scaling that multiply what other entries give.
_UNSCALED = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
_LOCAL_THETA, _GEMMA_PATTERN = 10000.0, 6  # constants of Gemma 3, which its files do not have
_GEMMA_27B_LAYERS = 62  # the one size whose scores are not divided by the root of the head's size


@dataclass(frozen=True)
class SourceFile:
    """A file's metadata, its tensors by name, and its architecture, which begins the keys of its sizes."""

    metadata: FileMetadata
    tensors: dict[str, StoredTensor]
    architecture: str

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def size(self, name: str, default: int | None = None) -> int:
        return self.metadata.integer(self.key(name), default)

    def has(self, ending: str) -> bool:
        return any(name.endswith(ending) for name in self.tensors)


def config_of(source: SourceFile, factors: list[float] | None) -> dict[str, Any]:
    """The config.json of a file. ``factors`` are the values of its tensor ROPE_FACTORS.

    Raises:
        ConfigError: the architecture is not served, or a value is missing or of another type.
    """
    convert = ARCHITECTURES.get(source.architecture)
    file = source.metadata.file
    if convert is None:
        served = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"model: the architecture {source.architecture[:40]!r} of {file} is not served; served: {served}."
        )
    if source.size("expert_count", 0):
        raise ConfigError(f"model: {file} is a mixture of experts; such GGUF files are not served.")
    heads = source.size("attention.head_count")
    head_dim = source.size("attention.key_length", 0) or source.size("embedding_length") // max(heads, 1)
    if source.size("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"model: keys and values of {file} differ in size; that is not served.")
    if source.size("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"model: {source.key('rope.dimension_count')} of {file} is not the size of a head; that is not served."
        )
    found = {
        "dtype": dtype_of(source.tensors.values()),
        "vocab_size": source.size("vocab_size", 0) or len(source.metadata.texts("tokenizer.ggml.tokens")),
        "hidden_size": source.size("embedding_length"),
        "intermediate_size": source.size("feed_forward_length"),
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.size("context_length"),
        "rms_norm_eps": source.metadata.number(source.key("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": HEAD not in source.tensors,
    }
    for name in ("bos", "eos"):
        if (key := f"tokenizer.ggml.{name}_token_id") in source.metadata:
            found[f"{name}_token_id"] = source.metadata.integer(key)
    return found | convert(source, _rope(source, factors))


def dtype_of(tensors: Collection[StoredTensor]) -> str:
    """The dtype of most weights; bfloat16 for weights in blocks."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[_DTYPES.get(tensor.kind, "bfloat16")] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _rope(source: SourceFile, factors: list[float] | None) -> dict[str, Any]:
    """rope_parameters. llama.cpp stores Llama 3's scaling as a tensor of ``factors``.

    As in llama.cpp, a factor without a type is linear.
    """
    metadata = source.metadata
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = metadata.number(source.key("rope.freq_base"), 10000.0)
    for name in _UNSCALED:
        if (value := metadata.number(source.key(f"rope.scaling.{name}"), 1.0)) != 1:
            raise ConfigError(
                f"model: {source.key(f'rope.scaling.{name}')} of {metadata.file} is {value}; only 1 is served."
            )
    # The second key is that of files from before November 2023.
    factor = next((key for name in _FACTORS if (key := source.key(name)) in metadata), None)
    kind = metadata.text(source.key("rope.scaling.type"), "none" if factor is None else "linear")
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"model: the rotary embedding {kind[:40]!r} of {metadata.file} is not served.")
    rope |= {"rope_type": kind, "factor": metadata.number(factor or source.key(_FACTORS[0]))}
    if kind == "yarn":
        original = source.size("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (key := source.key(f"rope.scaling.yarn_{name}")) in metadata:
                rope[name] = metadata.number(key)
    return rope


def _llama(source: SourceFile, rope: dict[str, Any]) -> dict[str, Any]:
    """Also Mistral and SmolLM2, whose files have this architecture."""
    attention, mlp = source.has(".attn_output.bias"), source.has(".ffn_down.bias")
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
    return found | {"attention_bias": attention, "mlp_bias": mlp}


def _qwen2(source: SourceFile, rope: dict[str, Any]) -> dict[str, Any]:
    found = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
    return found | {"use_sliding_window": False}


def _qwen3(source: SourceFile, rope: dict[str, Any]) -> dict[str, Any]:
    found = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
    return found | {"use_sliding_window": False, "attention_bias": source.has(".attn_output.bias")}


def _gemma3(source: SourceFile, rope: dict[str, Any]) -> dict[str, Any]:
    layers, heads = source.size("block_count"), source.size("attention.head_count")
    scaled = (
        source.size("embedding_length") // heads if layers == _GEMMA_27B_LAYERS else source.size("attention.key_length")
    )
    kinds = [
        "full_attention" if (at + 1) % _GEMMA_PATTERN == 0 else "sliding_attention" for at in range(min(layers, 10_000))
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled,
        "sliding_window": source.size("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": source.metadata.number(source.key("rope.freq_base"), 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


ARCHITECTURES: dict[str, Callable[[SourceFile, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}

"""check_checkpoint: checks a checkpoint's files within a second, without torch and transformers.

For architectures with RayLM's own classes, checks the names and shapes of all weights; for others, the general files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import safe_open

from raylm.checkpoint import Checkpoint, read_object
from raylm.errors import ConfigError
from raylm.models.architectures import architecture_of
from raylm.models.config_fields import OUR_DEFAULTS, Fields
from raylm.models.gguf_names import named_tensors

Shape = tuple[int, ...]
# Suffixes of names that a checkpoint may have in addition to weights. An fp8 KV cache reads the scales.
NO_WEIGHTS = ("rotary_emb.inv_freq", ".attn.masked_bias", ".self_attn.k_scale", ".self_attn.v_scale")
_NAMES_SHOWN = 6
DECODER = "model."  # begins the names of weights of a decoder with a head; embedding models may be saved without it


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raise ConfigError if files are missing or damaged, or do not match config.json."""
    architecture_of(checkpoint)
    _check_tokenizer(checkpoint.path / "tokenizer.json")
    check_weights(checkpoint)


def check_weights(checkpoint: Checkpoint) -> None:
    """As ``check_checkpoint``, without the tokenizer."""
    architecture = architecture_of(checkpoint)
    _ = checkpoint.eos_token_ids, checkpoint.max_position_embeddings, checkpoint.hidden_size  # each is checked
    stored = shapes_of(checkpoint)
    if architecture in OUR_DEFAULTS and "quantization_config" not in checkpoint.config:
        _compare(checkpoint, stored, Fields.of(architecture, checkpoint), architecture)


def shapes_of(checkpoint: Checkpoint) -> dict[str, Shape]:
    """The shape of each stored weight, by its name in a Hugging Face checkpoint. Raises ConfigError."""
    if checkpoint.gguf is not None:
        return {name: tensor.shape for name, tensor in named_tensors(checkpoint).items()}
    shapes = {name: shape for file in weight_files(checkpoint.path) for name, shape in stored_shapes(file).items()}
    if architecture_of(checkpoint) in OUR_DEFAULTS and "embed_tokens.weight" in shapes:  # saved without its head
        return {name if name.startswith("lm_head.") else f"{DECODER}{name}": shape for name, shape in shapes.items()}
    return shapes


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Checks that they exist.

    An index may only name files in its own directory. These may be links, as in the cache of the hub.
    """
    index, files = path / "model.safetensors.index.json", [path / "model.safetensors"]
    if index.exists():
        named = read_object(index).get("weight_map")
        if not isinstance(named, dict) or not all(_is_weights_name(name) for name in named.values()):
            raise ConfigError(
                f"model: {index} is not an index of safetensors files: its weight_map must map each weight to "
                "a file in the same directory whose name ends in .safetensors."
            )
        files = sorted({path / name for name in named.values()})
    for file in files:
        if not file.is_file():
            pickled = any(path.glob("*.bin")) and not any(path.glob("*.safetensors"))
            hint = "; PyTorch .bin files are never read, convert them to safetensors" if pickled else ""
            raise ConfigError(f"model: {path} has no {file.name}{hint}.")
    return files


def _is_weights_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not {"/", "\\", "\0"} & set(name)


def stored_shapes(file: Path) -> dict[str, Shape]:
    """The shape of each tensor in a file, from its header. Raises ConfigError if the file is invalid or cut."""
    try:
        with safe_open(file, framework="np") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own error class differs between versions
        raise ConfigError(
            f"model: {file} is not a readable safetensors file: {error}; the file may be incomplete."
        ) from error


def refuse_names(checkpoint: Checkpoint, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ConfigError if there are missing or unexpected names."""
    for what, names in (
        ("lacks weights that the model needs", sorted(missing)),
        ("holds weights that the model does not know", sorted(unexpected)),
    ):
        if names:
            rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise ConfigError(f"model: {checkpoint} {what}: {', '.join(names[:_NAMES_SHOWN])}{rest}.")


def wrong_shape(name: str, found: Collection[int], wanted: Collection[int]) -> ConfigError:
    return ConfigError(f"model: the weight {name} has the shape {tuple(found)}, config.json requires {tuple(wanted)}.")


def _check_tokenizer(file: Path) -> None:
    if not file.exists():
        raise ConfigError(f"model: {file.parent} has no tokenizer.json; convert its tokenizer to the fast format.")
    if "model" not in read_object(file):
        raise ConfigError(f"model: {file} is not a file of Hugging Face's tokenizers.")


def _compare(checkpoint: Checkpoint, stored: Mapping[str, Shape], fields: Fields, architecture: str) -> None:
    wanted = weight_shapes(fields, architecture)
    known = wanted | ({"lm_head.weight": wanted["model.embed_tokens.weight"]} if _tied(fields) else {})
    unexpected = {name for name in stored.keys() - known.keys() if not name.endswith(NO_WEIGHTS)}
    refuse_names(checkpoint, wanted.keys() - stored.keys(), unexpected)
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise wrong_shape(name, stored[name], shape)


def _tied(fields: Fields) -> bool:
    return fields.flag("tie_word_embeddings")


def weight_shapes(fields: Fields, architecture: str) -> dict[str, Shape]:
    """The names and shapes of the weights in a checkpoint of an architecture with RayLM's own class."""
    hidden, inner, vocab = map(fields.size, ("hidden_size", "intermediate_size", "vocab_size"))
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", fallback="num_attention_heads")
    head_dim = hidden // heads if fields.get("head_dim") is None else fields.size("head_dim")
    query, keys = heads * head_dim, kv_heads * head_dim
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias")
    qkv_bias = attention_bias or architecture == "Qwen2ForCausalLM"
    mlp_bias = architecture == "LlamaForCausalLM" and fields.flag("mlp_bias")
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", query, hidden, qkv_bias),
        ("self_attn.k_proj", keys, hidden, qkv_bias),
        ("self_attn.v_proj", keys, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, query, attention_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    ):
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if architecture == "Qwen3ForCausalLM":
        layer |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not _tied(fields):
        shapes["lm_head.weight"] = (vocab, hidden)
    numbers = range(fields.size("num_hidden_layers"))
    return shapes | {f"model.layers.{number}.{name}": shape for number in numbers for name, shape in layer.items()}

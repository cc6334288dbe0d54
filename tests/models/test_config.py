"""Our own decoder reads config.json as transformers does, also missing entries. Unsupported ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.decoder_config import DecoderConfig
from raylm.models.registry import model_class

FAMILIES = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "mistral": MistralForCausalLM,
}
BASE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def write(path: Path, family: str, without: str = "", **entries: Any) -> Checkpoint:
    config = {**BASE, **entries, "model_type": family, "architectures": [FAMILIES[family].__name__]}
    config.pop(without, None)
    (path / "config.json").write_text(json.dumps(config))
    return Checkpoint(path)


def configure(checkpoint: Checkpoint) -> DecoderConfig:
    return model_class(checkpoint).configure(checkpoint)  # type: ignore[attr-defined, no-any-return]


def assert_same(checkpoint: Checkpoint) -> None:
    """Compare with transformers' modules and configuration for the same file."""
    hf = AutoConfig.from_pretrained(checkpoint.path)
    with torch.device("meta"):
        theirs = FAMILIES[hf.model_type](hf)
    layer, ours = theirs.model.layers[0], configure(checkpoint)
    with torch.device("cpu"):
        rotary = type(theirs.model.rotary_emb)(hf)
    assert torch.equal(ours.rope.inv_freq, rotary.inv_freq)
    assert ours.rope.scaling == rotary.attention_scaling
    assert (len(ours.windows), ours.vocab_size) == (len(theirs.model.layers), theirs.lm_head.out_features)
    assert ours.num_heads * ours.head_dim == layer.self_attn.q_proj.out_features
    assert ours.num_kv_heads * ours.head_dim == layer.self_attn.k_proj.out_features
    assert ours.head_dim == layer.self_attn.head_dim
    assert ours.intermediate_size == layer.mlp.gate_proj.out_features
    assert ours.hidden_size == layer.mlp.gate_proj.in_features
    assert ours.biases.qkv == (layer.self_attn.q_proj.bias is not None)
    assert ours.biases.output == (layer.self_attn.o_proj.bias is not None)
    assert ours.biases.mlp == (layer.mlp.up_proj.bias is not None)
    assert ours.qk_norm == hasattr(layer.self_attn, "q_norm")
    assert ours.norm_eps == layer.input_layernorm.variance_epsilon
    assert ours.tied == hf.tie_word_embeddings
    probe = torch.linspace(-3, 3, 50)
    assert torch.equal(ours.activation(probe), layer.mlp.act_fn(probe))
    if hf.model_type in ("qwen2", "qwen3"):
        assert ours.windows == tuple(each.self_attn.sliding_window for each in theirs.model.layers)
    else:
        assert set(ours.windows) == {getattr(hf, "sliding_window", None)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"head_dim": 6, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}, "hidden_act": "gelu"},
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": None, "rope_theta": 3e4, "hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ],
    ids=lambda entries: ",".join(entries) or "least",
)
def test_equals_transformers(tmp_path: Path, family: str, entries: dict[str, Any]) -> None:
    assert_same(write(tmp_path, family, **entries))


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 0}),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            },
        ),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 77}),
    ],
)
def test_what_families_differ_in_equals_transformers(tmp_path: Path, family: str, entries: dict[str, Any]) -> None:
    assert_same(write(tmp_path, family, **entries))


@pytest.mark.parametrize("family", FAMILIES)
def test_key_value_heads_may_be_left_out(tmp_path: Path, family: str) -> None:
    assert_same(write(tmp_path, family, without="num_key_value_heads"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None; it must be an integer from 1 on"),
        ({"vocab_size": "99"}, "vocab_size is '99'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"num_key_value_heads": 5}, r"num_attention_heads is 32; it must be a multiple of num_key_value_heads \(5\)"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of silu, gelu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported, only default, linear"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters is .* must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' is incomplete"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(write(tmp_path, "llama", **entries))


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="intermediate_size is missing; it must be an integer from 1 on"):
        configure(write(tmp_path, "llama", without="intermediate_size"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1; .* from 0 on"),
    ],
)
def test_wrong_windows_are_named(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(write(tmp_path, "qwen3", **entries))


@pytest.mark.parametrize("window", [9, None])
def test_mistral_with_layer_types_has_the_windows_of_ministral(tmp_path: Path, window: int | None) -> None:
    """transformers loads such a file, as that of Ministral 8B, as its class for Ministral."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    kinds = kinds if window else ["full_attention"] * 4
    checkpoint = write(tmp_path, "mistral", sliding_window=window, layer_types=kinds, head_dim=2)
    hf = AutoConfig.from_pretrained(tmp_path)
    assert hf.model_type == "ministral"
    with torch.device("meta"):
        theirs = MinistralForCausalLM(hf)
    assert configure(checkpoint).windows == tuple(each.self_attn.sliding_window for each in theirs.model.layers)


def test_mistral_needs_the_window_of_its_sliding_layers(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "mistral", sliding_window=None, layer_types=["sliding_attention"] * 4)
    with pytest.raises(ConfigError, match="sliding_window is None; it must be set where layer_types has sliding_att"):
        configure(checkpoint)


def test_a_dynamic_embedding_needs_the_longest_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    checkpoint = write(tmp_path, "llama", without="max_position_embeddings", rope_scaling=rope)
    with pytest.raises(ConfigError, match="max_position_embeddings is missing; it must be given for the dynamic"):
        configure(checkpoint)

"""Weights are loaded exactly, from one or many files. Missing, unexpected and misshapen weights are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import load_model, loader, resolve_dtype
from raylm.models.checkpoint_check import check_weights
from tests.checkpoints import make_checkpoint
from tests.models.test_decoder import error, logits_of, reference_logits
from tests.models.transformers_backend.families import make_family

CPU = torch.device("cpu")
TOKENS = torch.arange(2, 40)


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_sharded_checkpoint_equals_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2", max_shard_size="60KB", tokenizer=False)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert error(logits_of(tmp_path, TOKENS), reference_logits(tmp_path, TOKENS)) < 1e-4


def test_bfloat16_weights_arrive_bit_by_bit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=False)
    saved = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        model, weights_bytes = load_model(Checkpoint(tmp_path), dtype, CPU)
        assert weights_bytes == dtype.itemsize * sum(tensor.numel() for tensor in saved.values())
        embedding = model.get_submodule("model.embed_tokens").weight
        assert embedding.dtype == dtype
        assert torch.equal(embedding, saved["model.embed_tokens.weight"].to(dtype))


def test_tied_head_is_one_tensor_and_may_be_saved_twice(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True, tokenizer=False)
    once = logits_of(tmp_path, TOKENS)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(tmp_path, TOKENS), once)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(tmp_path: Path, architecture: str) -> None:
    """transformers unties such a head. With the embedding as its head, the model would compute other logits."""
    make_family(tmp_path, architecture, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": torch.ones(320, 64)}))
    with pytest.raises(ConfigError, match=r"lm_head.weight of .* differs from the embedding.*set tie_word_embeddings"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"])
def test_names_may_lack_the_prefix_of_the_decoder(tmp_path: Path, architecture: str) -> None:
    """A decoder that was saved without its head, as Qwen3's embedding models and GPT-2, has names without a prefix."""
    make_family(tmp_path, architecture, tie_word_embeddings=True)
    wanted = logits_of(tmp_path, TOKENS)
    edit_weights(tmp_path, strip_prefixes)
    check_weights(Checkpoint(tmp_path))
    assert torch.equal(logits_of(tmp_path, TOKENS), wanted)


def strip_prefixes(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[name.removeprefix("model.").removeprefix("transformer.")] = weights.pop(name)


def test_a_weight_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, intermediate_size=97, tokenizer=False)
    with pytest.raises(ConfigError, match="in bfloat16: 97 inputs are not a multiple of 2; set dtype: float32"):
        load_model(Checkpoint(tmp_path), torch.bfloat16, CPU)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_weights(tmp_path, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert error(logits_of(tmp_path, TOKENS), reference_logits(tmp_path, TOKENS)) < 1e-4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), r"lacks .*layers\.1\.self_attn\.k_proj\.weight"),
        (lambda w: w.pop("lm_head.weight"), r"lacks .*lm_head\.weight"),
        (lambda w: w.update({"model.extra.weight": torch.ones(3)}), r"does not know: model\.extra\.weight"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight .*\(63,\).*\(64,\)"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.ones(1, 64)}),
            r"up_proj\.weight .*\(1, 64\).*\(96, 64\)",
        ),
    ],
    ids=["missing", "missing-head", "unexpected", "shape", "broadcastable"],
)
def test_wrong_weights_are_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], named: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_weights(tmp_path, change)
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_weights(tmp_path, lambda w: [w.pop(name) for name in list(w) if "layers.1" in name])
    with pytest.raises(ConfigError, match="and 3 more"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB", tokenizer=False)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


def test_torn_file_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


def test_pickles_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\.bin files are never read"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*supported: .*Llama.*Mistral.*Qwen2.*Qwen3"),
        ({"architectures": ...}, "none named"),
        pytest.param(
            {"quantization_config": {"quant_method": "aqlm"}},
            r"quant_method is 'aqlm'; supported: 'awq', 'compr",
        ),
        ({"num_hidden_layers": 3}, "lacks weights"),
        ({"hidden_size": 66}, r"weight has the shape \(320, 64\), config.json requires \(320, 66\)"),
    ],
)
def test_unsupported_checkpoints_are_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "asked", "named"),
    [
        ({}, "int4", "quantization: int4 is not supported: .* is not installed"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            None,
            "model: the quantized weights of .* are not supported",
        ),
    ],
)
def test_what_is_quantized_is_refused_where_quantization_was_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], asked: str | None, named: str
) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(tmp_path, **changes)
    monkeypatch.setattr(loader, "QUANTIZATION", {})
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, asked)


@pytest.mark.parametrize(
    ("declared", "asked", "device", "resolved"),
    [
        ({"dtype": "bfloat16"}, "auto", "cpu", torch.bfloat16),
        ({"dtype": ..., "torch_dtype": "bfloat16"}, "auto", "cpu", torch.bfloat16),
        ({"dtype": ...}, "auto", "cpu", torch.float32),
        ({"dtype": "bfloat16"}, "float32", "cpu", torch.float32),
        ({"dtype": "float16"}, "auto", "cpu", torch.float32),
        ({"dtype": "float16"}, "auto", "cuda", torch.float16),
        ({"dtype": "float32"}, "float16", "cuda", torch.float16),
    ],
)
def test_dtype_is_the_checkpoints_or_the_one_asked_for(
    tmp_path: Path, declared: dict[str, object], asked: str, device: str, resolved: torch.dtype
) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(tmp_path, **declared)
    assert resolve_dtype(Checkpoint(tmp_path), asked, torch.device(device)) == resolved


@pytest.mark.parametrize(
    ("declared", "asked", "named"), [("float32", "float16", "CPU"), ("float64", "auto", "float64")]
)
def test_unserved_dtypes_are_refused(tmp_path: Path, declared: str, asked: str, named: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(tmp_path, dtype=declared)
    with pytest.raises(ConfigError, match=named):
        resolve_dtype(Checkpoint(tmp_path), asked, CPU)

"""Families with transformers' modeling code agree with transformers, and unsupported ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import load_model
from raylm.models.architectures import ARCHITECTURES, GENERATIVE
from raylm.models.linear import Linear
from raylm.models.transformers_backend import TRANSFORMERS_BACKEND, inspection, module_replacement
from raylm.models.transformers_backend.model import TransformersForCausalLM
from tests.models.transformers_backend.families import (
    BOUNDS,
    family_error,
    logit_error,
    make_family,
    path_of,
    play,
    read_table,
)
from tests.worker.driver import Driver, random_prompt

CPU = torch.device("cpu")
COMPACT = sorted(name for name, served in GENERATIVE.items() if served != TRANSFORMERS_BACKEND)


def load(path: Path, quantization: str | None = None) -> tuple[TransformersForCausalLM, int]:
    model, weights_bytes = load_model(Checkpoint(path), torch.float32, CPU, quantization)
    assert isinstance(model, TransformersForCausalLM)
    return model, weights_bytes


def allow(monkeypatch: pytest.MonkeyPatch, *architectures: str) -> None:
    """Serve ``architectures`` with transformers' modeling code, whether or not they are registered for it."""
    for architecture in architectures:
        monkeypatch.setitem(ARCHITECTURES, architecture, TRANSFORMERS_BACKEND)


@pytest.mark.parametrize("architecture", sorted(GENERATIVE))
def test_logits_are_as_near_to_transformers_as_the_table_says(architecture: str) -> None:
    told = read_table()[architecture]
    assert told[0] == path_of(architecture)
    for dtype, said in zip(BOUNDS, told[1:], strict=True):
        error = family_error(architecture, dtype)
        assert error < BOUNDS[dtype]
        assert said < BOUNDS[dtype]
        assert error < 5 * said  # another CPU rounds differently, but not by an order of magnitude


def test_the_table_holds_the_registered_architectures() -> None:
    assert list(read_table()) == sorted(GENERATIVE, key=str.lower)


@pytest.mark.parametrize("architecture", COMPACT)
def test_compact_families_are_the_same_on_both_paths(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family(tmp_path, architecture)
    compact = play(tmp_path, torch.float32)
    allow(monkeypatch, architecture)
    assert isinstance(load(tmp_path)[0], TransformersForCausalLM)
    for one, other in zip(compact, play(tmp_path, torch.float32), strict=True):
        assert one.tokens == other.tokens
        logits, same = (torch.stack(list(seq.logits.values())) for seq in (one, other))
        assert (logits - same).abs().max() < 1e-4 * logits.abs().max()


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (inspection, "_window", lambda mask: None),
        (
            module_replacement.Stack,
            "take",
            lambda self, part, x: self._product(x).split(self.sizes, dim=-1)[-1 - part],
        ),
    ],
    ids=["windows are ignored", "gate and up are exchanged"],
)
def test_planted_faults_are_seen(owner: Any, name: str, wrong: Any, tmp_path: Path, monkeypatch: Any) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}  # so that swapped parts have the same shape
    make_family(tmp_path, "Gemma2ForCausalLM", **heads)
    assert logit_error(tmp_path, torch.float32) < 1e-4
    monkeypatch.setattr(owner, name, wrong)
    assert logit_error(tmp_path, torch.float32) > 1e-2


def test_what_reads_the_same_is_multiplied_once(tmp_path: Path) -> None:
    make_family(tmp_path, "Qwen2MoeForCausalLM")
    linears = [tuple(module.parts) for module in load(tmp_path)[0].modules() if isinstance(module, Linear)]
    assert linears.count(("q_proj", "k_proj", "v_proj")) == 2
    assert linears.count(("gate_proj", "up_proj")) == 2 * (4 + 1)  # each expert, and the shared expert
    assert linears.count(("lm_head",)) == 1


def test_experts_are_no_cuda_graph(tmp_path: Path) -> None:
    assert not load(make_family(tmp_path / "experts", "Qwen2MoeForCausalLM"))[0].capturable
    assert load(make_family(tmp_path / "none", "Gemma2ForCausalLM"))[0].capturable


def test_only_rows_that_sample_go_through_the_head(tmp_path: Path) -> None:
    make_family(tmp_path, "Gemma2ForCausalLM")
    driver = Driver(tmp_path)
    rows: list[int] = []
    logits = driver.runner.forward.logits
    driver._keep = lambda plan, output: None  # type: ignore[method-assign]
    driver.runner.forward.logits = lambda hidden: (rows.append(len(hidden)), logits(hidden))[1]  # type: ignore
    for seq in range(3):
        driver.add(seq, random_prompt(40, seq))
    driver.step({0: 40, 1: 40, 2: 17})
    assert rows == [2]


def test_tied_embeddings_lie_in_memory_once(tmp_path: Path) -> None:
    make_family(tmp_path, "Gemma2ForCausalLM")
    model, weights_bytes = load(tmp_path)
    assert weights_bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert not any(parameter.shape == (320, 64) for parameter in model.parameters())


def test_checkpoints_may_hold_their_experts_stacked(tmp_path: Path) -> None:
    make_family(tmp_path, "Qwen3MoeForCausalLM")
    error = logit_error(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    save_file(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), file, {"format": "pt"})
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(file)
    assert logit_error(tmp_path, torch.float32) == error


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.layers.0.mlp.experts.2.w1.weight"), r"lacks .*layers\.0\.mlp\.experts\.gate_up_proj"),
        (lambda w: w.pop("model.norm.weight"), r"lacks .*model\.norm\.weight"),
        (lambda w: w.update({"model.layers.9.odd": torch.ones(3)}), r"does not know: model\.layers\.9\.odd"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight .*\(63,\).*\(64,\)"),
    ],
    ids=["missing expert", "missing norm", "unexpected", "shape"],
)
def test_wrong_weights_are_named(change: Any, named: str, tmp_path: Path) -> None:
    file = make_family(tmp_path, "MixtralForCausalLM") / "model.safetensors"
    weights = load_file(file)
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in weights
    weights = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in weights.items()}
    change(weights)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=named):
        load(tmp_path)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GptOssForCausalLM", {}, "attention sinks"),
    ("DeepseekV2ForCausalLM", {}, "latent attention"),
    ("DiffLlamaForCausalLM", {}, "attends twice"),
    ("BloomForCausalLM", {}, "changes attention masks itself"),
    ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "only 1 of its 2 layers"),
    ("CTRLLMHeadModel", {}, "mix tokens outside of attention"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "neither causal nor a sliding window"),
]


@pytest.mark.parametrize(("architecture", "overrides", "named"), REFUSED, ids=[case[0] for case in REFUSED])
def test_other_attention_is_refused(
    architecture: str, overrides: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family(tmp_path, architecture, **overrides)
    allow(monkeypatch, architecture)
    with pytest.raises(ConfigError, match=named):
        load(tmp_path)


def test_unknown_architectures_are_refused_with_those_served(tmp_path: Path) -> None:
    make_family(tmp_path, "GptOssForCausalLM")
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM .* not supported; supported: Afmoe.*Gemma2.*Vault"):
        load(tmp_path)


def test_frequencies_of_long_contexts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Beyond the original length, transformers changes the frequencies of the whole batch.

    Here no sequence is longer.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    }
    make_family(tmp_path, "Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=64)
    assert Checkpoint(tmp_path).max_position_embeddings == 64
    assert logit_error(tmp_path, torch.float32) < 1e-4


def test_an_unknown_longest_context_is_refused(tmp_path: Path) -> None:
    """A longer prompt would read position embeddings that the model does not have."""
    make_family(tmp_path, "OPTForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="does not say the longest context, max_position_embeddings"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_mixture_may_have_no_shared_experts(tmp_path: Path) -> None:
    make_family(tmp_path, "Dots1ForCausalLM", n_shared_experts=0)
    assert logit_error(tmp_path, torch.float32) < BOUNDS[torch.float32]

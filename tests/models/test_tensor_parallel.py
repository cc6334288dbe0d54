"""The ranks' parts add up to the whole: the plan, each layer with random shapes, and whole models over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from raylm import models
from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import SINGLE_RANK, Ranks, loader
from raylm.models.llama import LlamaForCausalLM
from raylm.models.registry import model_class
from raylm.models.tensor_parallel import PLAN
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.models.test_decoder import attend, error, reference_logits
from tests.ranks import Apart, on_all_ranks, one_at_a_time

CPU = torch.device("cpu")
load_model = one_at_a_time(models.load_model)
TOKENS = torch.arange(2, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_that_of_transformers(family: str) -> None:
    config, model = (getattr(transformers, name) for name in FAMILIES[family])
    theirs = {name.rpartition(".")[2]: style for name, style in config.base_model_tp_plan.items()}
    theirs |= {name: style.partition("_")[0] for name, style in model._tp_plan.items()}
    theirs = {name: style for name, style in theirs.items() if not style.startswith("replicated")}
    ours = {name: style for name, (style, _) in PLAN.items()}
    assert ours.pop("embed_tokens") == "colwise"  # transformers does not split it
    assert ours == theirs


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """(ranks, config.json) of a decoder that can be split between the ranks."""
    size = draw(st.sampled_from([2, 3, 4]))
    kv_heads = draw(st.sampled_from([1, size, 2 * size] + ([2] if size == 4 else [])))
    groups = draw(st.sampled_from([group for group in (1, 2, 3, 4) if kv_heads * group % size == 0]))
    return size, {
        "vocab_size": draw(st.integers(size, 70)),
        "hidden_size": draw(st.integers(3, 40)),
        "intermediate_size": size * draw(st.integers(1, 20)),
        "num_hidden_layers": 1,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 9)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


def write(path: Path, config: dict[str, Any], seed: int = 0) -> Checkpoint:
    """Write a Llama checkpoint with random weights."""
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    with torch.device("meta"):
        targets = model_class(Checkpoint(path)).from_checkpoint(Checkpoint(path), SINGLE_RANK).targets()
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(target.shape, generator=generator) for name, target in targets.items()}
    save_file(weights, path / "model.safetensors")
    return Checkpoint(path)


def load(checkpoint: Checkpoint, ranks: Ranks = SINGLE_RANK, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model, _ = load_model(checkpoint, dtype, CPU, None, ranks)
    assert isinstance(model, LlamaForCausalLM)
    return model


def parts_of(model: LlamaForCausalLM, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The output of each kind of layer. With isolated ranks, layers that exchange data return their own part of it."""
    layer = model.model.layers[0]
    assert model.rotary is not None
    return {
        "embedding": model.model.embed_tokens(tokens),
        "attention": layer.self_attn(x, model.rotary(torch.arange(len(x))), attend),
        "mlp": layer.mlp(x),
        "head": model.logits(x),
    }


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max())


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_the_ranks_layers_add_up_to_the_whole(shape: tuple[int, dict[str, Any]]) -> None:
    size, config = shape
    with TemporaryDirectory() as folder, torch.inference_mode():
        checkpoint = write(Path(folder), config)
        tokens, x = torch.arange(config["vocab_size"]), torch.randn(7, config["hidden_size"])
        whole = parts_of(load(checkpoint), tokens, x)
        parts = [parts_of(load(checkpoint, Apart(rank, size)), tokens, x) for rank in range(size)]
    for name in ("embedding", "attention", "mlp"):
        assert_close(torch.stack([part[name] for part in parts]).sum(0), whole[name])
    assert_close(torch.cat([part["head"] for part in parts], dim=1), whole["head"])


def test_a_rank_reads_its_part_of_the_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, attention_bias=True)
    read: dict[str, int] = {}

    class Spy:
        """An open file that counts the numbers that are read of each tensor."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = safe_open(*args, **options)

        def __enter__(self) -> Spy:
            self.weights = self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def keys(self) -> list[str]:
            return list(self.weights.keys())

        def get_tensor(self, name: str) -> Tensor:
            return self.note(name, self.weights.get_tensor(name))

        def note(self, name: str, tensor: Tensor) -> Tensor:
            read[name] = tensor.numel()
            return tensor

        def get_slice(self, name: str) -> Any:
            spy, inner = self, self.weights.get_slice(name)

            class Slice:
                def get_shape(self) -> list[int]:
                    return list(inner.get_shape())

                def __getitem__(self, key: Any) -> Tensor:
                    return spy.note(name, inner[key])

            return Slice()

    monkeypatch.setattr(loader, "safe_open", Spy)
    load(Checkpoint(tmp_path))
    whole, read = read, {}
    totals = dict.fromkeys(whole, 0)
    for rank in range(2):
        load(Checkpoint(tmp_path), Apart(rank, 2))
        for name, count in read.items():
            totals[name] += count
        read.clear()
    for name, count in totals.items():
        assert count == whole[name] * (2 if "norm" in name else 1), name


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 2, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", 4, {"num_key_value_heads": 1, "vocab_size": 323}),
    (
        "llama",
        3,
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
    ("qwen2", 2, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", 4, {}),
    ("qwen3", 2, {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 321}),
    ("mistral", 2, {"sliding_window": 9, "head_dim": 8}),
]


@pytest.mark.parametrize(("family", "size", "overrides"), CASES, ids=str)
def test_ranks_together_give_the_logits_of_transformers(
    tmp_path: Path, family: str, size: int, overrides: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path, family, tokenizer=False, **overrides)

    def run(ranks: Ranks) -> tuple[Tensor, Tensor]:
        model = load(Checkpoint(tmp_path), ranks)
        hidden = model(TOKENS, torch.arange(len(TOKENS)), attend)
        return hidden, model.logits(hidden)

    (hidden, logits), *others = on_all_ranks(size, run)
    assert error(logits, reference_logits(tmp_path, TOKENS)) < 1e-4
    assert all(torch.equal(hidden, other) for other, _ in others)


def test_weights_are_counted_by_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    _, whole = load_model(Checkpoint(tmp_path), torch.float32, CPU)
    _, half = load_model(Checkpoint(tmp_path), torch.float32, CPU, None, Apart(1, 2))
    assert 0.5 * whole < half < 0.52 * whole


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_ranks_round_their_own_weights(tmp_path: Path, asked: str) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, hidden_size=128, intermediate_size=128, head_dim=32)

    def run(ranks: Ranks) -> Tensor:
        model, _ = load_model(Checkpoint(tmp_path), torch.float32, CPU, asked, ranks)
        return model.logits(model(TOKENS, torch.arange(len(TOKENS)), attend))

    logits, _ = on_all_ranks(2, run)
    with torch.inference_mode():
        alone = run(SINGLE_RANK)
    reference = reference_logits(tmp_path, TOKENS)
    assert 1e-3 < error(logits, reference) < 1.5 * error(alone, reference)


@pytest.mark.parametrize(
    ("size", "overrides", "said"),
    [
        (3, {}, "3 ranks cannot share 4 attention heads evenly"),
        (4, {"intermediate_size": 98}, "4 ranks cannot share 98 inputs of down_proj evenly"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            "4 ranks can neither share nor repeat 6 KV heads",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(
    tmp_path: Path, size: int, overrides: dict[str, Any], said: str
) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, **overrides)
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel_size: {said}"):
        load(Checkpoint(tmp_path), Apart(0, size))


def test_a_model_of_transformers_code_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"]}')
    with pytest.raises(
        ConfigError, match=r"engine\.tensor_parallel_size: Gemma2ForCausalLM is served by one rank only"
    ):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, None, Apart(0, 2))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                                  "num_attention_heads": 2, "head_dim": 4})  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 6}))
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has the shape \(8, 8\), config\.json requires \(6, 8\)"):
        load(checkpoint, Apart(0, 2))


def test_a_quarter_of_70_billion_weights_takes_33_gib(tmp_path: Path) -> None:
    """As configs/llama-3.3-70b-tp4.yaml says of a GPU's memory."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192,
              "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
              "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(4):
        with torch.device("meta"):
            model = LlamaForCausalLM.from_checkpoint(Checkpoint(tmp_path), Apart(rank, 4))
        weights = sum(2 * target.numel() for target in model.targets().values())
        assert weights / 2**30 == pytest.approx(32.9, abs=0.1)
        token = sum(2 * 2 * spec.num_kv_heads * spec.head_dim for spec in model.attention_specs)
        assert token == 80 * 1024

"""The layers of each stage, and the parts of a checkpoint that are read for them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import PipelineStage, SingleRank, load_model
from raylm.models.llama import LlamaForCausalLM
from tests.checkpoints import make_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("head", [0.0, 0.7, 3.2, 40.0])
def test_no_other_division_has_a_faster_slowest_stage(count: int, head: float) -> None:
    total = 13
    layers = [PipelineStage(number, count).layers(total, head) for number in range(count)]
    assert [each.start for each in layers] == [0, *(each.stop for each in layers[:-1])]
    assert layers[-1].stop == total
    assert all(len(each) for each in layers)
    slowest = max(*map(len, layers), len(layers[-1]) + head)
    others = (max(-(-(total - last) // max(1, count - 1)), last + head) for last in range(1, total - count + 2))
    assert slowest <= min(others) or count == 1
    assert all(abs(len(a) - len(b)) <= 1 for a, b in pairwise(layers[:-1]))


@pytest.mark.parametrize("tied", [False, True])
def test_each_weight_is_read_by_the_stages_that_use_it(tmp_path: Path, *, tied: bool) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=5, tie_word_embeddings=tied)
    stored = load_file(tmp_path / "model.safetensors")
    names = [_loaded(tmp_path, number) for number in range(3)]
    assert set().union(*names) == stored.keys()
    twice = [name for name in stored if sum(name in each for each in names) > 1]
    assert twice == (["model.embed_tokens.weight"] if tied else [])
    assert "model.embed_tokens.weight" in names[0]
    assert "model.norm.weight" in names[2]
    assert {name.split(".")[2] for name in names[1]} == {"2", "3"}


def _loaded(path: Path, number: int) -> set[str]:
    ranks = SingleRank(PipelineStage(number, 3))
    load_model(Checkpoint(path), torch.float32, CPU, None, ranks)
    with torch.device("meta"):
        return set(LlamaForCausalLM.from_checkpoint(Checkpoint(path), ranks).targets())


def test_a_weight_of_no_stage_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=4)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"model.layers.4.mlp.up_proj.weight": torch.zeros(96, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.4\.mlp"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, None, SingleRank(PipelineStage(0, 2)))


def test_a_missing_weight_is_refused_by_its_stage(tmp_path: Path) -> None:
    """The whole checkpoint is checked first, as for one worker."""
    make_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=4)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.3.mlp.up_proj.weight"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights that the model needs: model\.layers\.3\.mlp"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, None, SingleRank(PipelineStage(1, 2)))


def test_a_model_of_transformers_code_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"]}')
    ranks = SingleRank(PipelineStage(0, 2))
    with pytest.raises(ConfigError, match=r"engine\.pipeline_parallel_size: Gemma2ForCausalLM is served by one rank"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, None, ranks)

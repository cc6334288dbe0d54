"""Errors in a checkpoint's files are found in their headers, in one line, without importing torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm.checkpoint import EMBEDDED, Checkpoint
from raylm.errors import ConfigError
from raylm.models import SINGLE_RANK, check_checkpoint
from raylm.models.checkpoint_check import weight_shapes
from raylm.models.config_fields import OUR_DEFAULTS, Fields
from raylm.models.loader import load_model, resolve_dtype
from raylm.models.registry import model_class

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "checkpoint"))


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    weights = load_file(file) | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, file)


def cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:count])


def index(path: Path, file: object) -> None:
    """Write an index that says that all weights are in ``file``. A copy of them is outside of the directory."""
    shutil.copy(path / "model.safetensors", path.parent / "outside.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def generation(path: Path, **values: object) -> None:
    (path / "generation_config.json").write_text(json.dumps(values))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "cut config": (lambda path: cut(path / "config.json", 50), "config.json is not valid JSON"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no model.safetensors"),
    "cut weights": (lambda path: cut(path / "model.safetensors", 10**6), "not a readable safetensors file"),
    "cut header": (lambda path: cut(path / "model.safetensors", 100), "not a readable safetensors file"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "cut tokenizer": (lambda path: cut(path / "tokenizer.json", 1000), "tokenizer.json is not valid JSON"),
    "unknown architecture": (
        lambda path: change_config(path, architectures=["MambaForCausalLM"]),
        "the architecture MambaForCausalLM",
    ),
    "wrong shape": (
        lambda path: change_config(path, intermediate_size=512),
        r"mlp\.\w+_proj\.weight has the shape .*, config\.json requires \(.*512.*\)",
    ),
    "more layers": (lambda path: change_config(path, num_hidden_layers=6), r"lacks weights .*model\.layers\.5\."),
    "fewer layers": (lambda path: change_config(path, num_hidden_layers=4), r"does not know: model\.layers\.4\."),
    "no number": (lambda path: change_config(path, hidden_size="256"), "hidden_size is '256'; it must be an integer"),
    "a weight too much": (
        lambda path: change_weights(path, extra=torch.ones(1)),
        "holds weights that the model does not know: extra",
    ),
    "a missing weight": (
        lambda path: change_weights(path, **{"model.norm.weight": None}),
        r"lacks weights that the model needs: model\.norm\.weight",
    ),
    "an index to the directory above": (
        lambda path: index(path, "../outside.safetensors"), "a file in the same directory"),
    "an index to anywhere": (
        lambda path: index(path, str(path.parent / "outside.safetensors")), "a file in the same directory"),
    "an index to a number": (lambda path: index(path, 5), "a file in the same directory"),
    "an index to no safetensors": (lambda path: index(path, "config.json"), "a file in the same directory"),
    "an index without a map": (
        lambda path: (path / "model.safetensors.index.json").write_text("{}"), "not an index of safetensors files"),
    "a pipe as config": (lambda path: pipe(path / "config.json"), "config.json is not a regular file"),
    "a pipe as weights": (lambda path: pipe(path / "model.safetensors"), "has no model.safetensors"),
    "a deep config": (lambda path: (path / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
    "eos is a float": (lambda path: generation(path, eos_token_id=1e30), "eos_token_id of .* is 1e"),
    "eos is no token": (lambda path: generation(path, eos_token_id=2**63), "eos_token_id of .* is 9223372036854775808"),
    "eos is a list of null": (lambda path: generation(path, eos_token_id=[None]), r"eos_token_id of .* is \[None\]"),
    "architectures is a text": (lambda path: change_config(path, architectures="Llama"), "architectures is 'Llama'"),
    "architectures of lists": (lambda path: change_config(path, architectures=[[]]), r"architectures is \[\["),
    "a length that is no number": (
        lambda path: change_config(path, max_position_embeddings={}), "max_position_embeddings is {}"),
    "a length without an end": (
        lambda path: change_config(path, max_position_embeddings=float("inf")), "max_position_embeddings is inf"),
    "layers for years": (lambda path: change_config(path, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "a size of many digits": (lambda path: change_config(path, vocab_size=10**400), "vocab_size is 1000"),
    "text is a list": (lambda path: change_config(path, hidden_size=None, text_config=[]), "hidden_size is None"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(path: Path, name: str) -> None:
    change, said = FAULTS[name]
    check_checkpoint(Checkpoint(path))
    change(path)
    with pytest.raises(ConfigError, match=said) as told:
        check_checkpoint(Checkpoint(path))
    assert "\n" not in str(told.value)


def test_links_are_followed_as_the_hubs_cache_has_them(path: Path) -> None:
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for file in [file for file in path.iterdir() if file.is_file()]:
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / "blobs" / file.name)
    index(path, "model.safetensors")
    check_checkpoint(Checkpoint(path))


_QWEN: dict[str, object] = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
WRONG_IN_A_DECODER: list[tuple[dict[str, object], str]] = [
    ({"hidden_act": ["silu"]}, "hidden_act"),
    (_QWEN | {"layer_types": 5}, "layer_types"),
    (_QWEN | {"layer_types": [[]] * 5}, "layer_types"),
    (_QWEN | {"sliding_window": 1e30}, "sliding_window"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    ({"rope_parameters": {"rope_type": []}}, "rotary embedding"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"dtype": ["x"]}, "dtype"),
    ({"intermediate_size": 2**31 - 1}, "mlp"),
    ({"intermediate_size": 2**31 - 1, "hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1}, "too large|shape"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG_IN_A_DECODER)
def test_a_decoder_is_refused_by_the_fields_name(path: Path, changes: dict[str, object], said: str) -> None:
    change_config(path, **changes)
    checkpoint = Checkpoint(path)
    with pytest.raises(ConfigError, match=said):
        load_model(checkpoint, resolve_dtype(checkpoint, "auto", torch.device("cpu")), torch.device("cpu"))


@pytest.mark.parametrize("architecture", OUR_DEFAULTS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_the_shapes_are_those_of_the_model(tmp_path: Path, architecture: str, tied: bool, biases: bool) -> None:
    """Also if config.json omits entries."""
    switches = {"tie_word_embeddings": tied} | ({"attention_bias": True, "mlp_bias": True} if biases else {})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]} | SIZES | switches))
    checkpoint = Checkpoint(tmp_path)
    with torch.device("meta"):
        model = model_class(checkpoint).from_checkpoint(checkpoint, SINGLE_RANK)
    wanted = {name: tuple(target.shape) for name, target in model.targets().items()}
    assert weight_shapes(Fields.of(architecture, checkpoint), architecture) == wanted


def test_the_command_tells_it_without_torch_or_ray(path: Path) -> None:
    change_config(path, intermediate_size=512)
    script = (
        "import sys\n"
        "from raylm.cli.main import app\n"
        "try:\n"
        f"    app(['serve', {str(path)!r}])\n"
        "finally:\n"
        "    print({'torch', 'transformers', 'ray'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n"
    (line,) = done.stderr.splitlines()
    assert "config.json requires" in line
    assert done.returncode == 2

"""What is wrong with a checkpoint's files is told from their headers, in one line, without importing torch."""

from __future__ import annotations

import json
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
        r"mlp\.\w+_proj\.weight has the shape .*, config\.json asks for \(.*512.*\)",
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
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(path: Path, name: str) -> None:
    change, said = FAULTS[name]
    check_checkpoint(Checkpoint(path))
    change(path)
    with pytest.raises(ConfigError, match=said) as told:
        check_checkpoint(Checkpoint(path))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("architecture", OUR_DEFAULTS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_the_shapes_are_those_of_the_model(tmp_path: Path, architecture: str, tied: bool, biases: bool) -> None:
    """Also where entries are left out."""
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
    assert "config.json asks for" in line
    assert done.returncode == 2

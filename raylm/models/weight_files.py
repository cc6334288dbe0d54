"""The safetensors files of a checkpoint: which there are, what they hold, and their tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.ranks import WHOLE, Shard

_INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the checkpoint in ``path``.

    Raises:
        ConfigError: one is missing, or the index of them is not readable.
    """
    if (path / _INDEX).exists():
        files = sorted({path / file for file in _read_index(path / _INDEX).values()})
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.exists():
            pickled = any(path.glob("*.bin")) and not any(path.glob("*.safetensors"))
            hint = "; PyTorch .bin files are never read, convert them to safetensors" if pickled else ""
            raise ConfigError(f"model: {path} has no {file.name}{hint}.")
    return files


def _read_index(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model: {file} is no index of safetensors files.") from error


def weight_names(file: Path) -> list[str]:
    """The names of what ``file`` holds.

    Raises:
        ConfigError: it is no safetensors file, or torn.
    """
    try:
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except Exception as error:  # safetensors' own error class is not stable across versions
        raise ConfigError(f"model: {file} is not a readable safetensors file: {error}") from error


def tensors(files: list[Path], wanted: set[str], shards: Mapping[str, Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``wanted`` tensors one by one, in the order of the files; of those in ``shards`` only that part.

    Raises:
        ConfigError: a tensor cannot be divided as its shard says.
    """
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if name in wanted:
                    yield name, shards.get(name, WHOLE).read(weights, name)

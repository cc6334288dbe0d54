"""The safetensors files of a checkpoint: which there are, what they hold, and their tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from raylm.errors import ConfigError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank holds the entries ``part`` along ``dim`` (0 or 1), of which the checkpoint's tensor has ``count``."""

    dim: int
    part: range
    count: int


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
                    shard = shards.get(name)
                    yield name, weights.get_tensor(name) if shard is None else _read_shard(weights, name, shard)


def _read_shard(weights: Any, name: str, shard: Shard) -> Tensor:
    """Read one rank's part from an open safetensors file, and nothing else of the tensor."""
    stored, entries = weights.get_slice(name), slice(shard.part.start, shard.part.stop)
    shape = tuple(stored.get_shape())
    if len(shape) <= shard.dim or shape[shard.dim] != shard.count:
        raise ConfigError(
            f"model: the weight {name} has the shape {shape}, config.json asks for {shard.count} along the "
            f"{('first', 'second')[shard.dim]} dimension."
        )
    found: Tensor = stored[entries] if shard.dim == 0 else stored[:, entries]
    return found

"""Scales of an fp8 KV cache in a checkpoint: one for the keys and one for the values of each layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from safetensors import safe_open
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.causal_lm import AttentionSpec
from raylm.models.checkpoint_check import weight_files

_NAME = re.compile(r"(?:.+\.)?layers\.(\d+)\.self_attn\.([kv])_scale")


def with_kv_scales(specs: Sequence[AttentionSpec], checkpoint: Checkpoint) -> list[AttentionSpec]:
    """The specs with the scales in ``checkpoint``, under the names of compressed-tensors; the default is 1.0.

    Raises:
        ConfigError: a scale is not a positive number, or a layer has several.
    """
    found: dict[tuple[int, str], float] = {}
    for name, layer, which, scale in _stored(checkpoint):
        if scale.numel() != 1 or not bool((scale > 0) & scale.isfinite() & scale.reciprocal().isfinite()):
            raise ConfigError(
                f"model: {name} of {checkpoint} is {scale.flatten()[:4].tolist()}; a scale of the KV cache must "
                "be one positive number for each layer. With cache.dtype: auto it is not needed."
            )
        found[layer, which] = scale.item()
    return [
        replace(spec, key_scale=found.get((at, "k"), 1.0), value_scale=found.get((at, "v"), 1.0))
        for at, spec in enumerate(specs)
    ]


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, int, str, Tensor]]:
    """Yields (name, layer, "k" or "v", scale)."""
    for file in [] if checkpoint.gguf is not None else weight_files(checkpoint.path):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                if (match := _NAME.fullmatch(name)) is not None:
                    yield name, int(match[1]), match[2], weights.get_tensor(name).float()

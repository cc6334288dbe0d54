"""Rotary position embeddings (Su et al. 2021): frequencies by transformers' own functions, applied to all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raylm.errors import ConfigError

_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


class Rotary:
    """Angles of positions; ``scaling`` multiplies cosine and sine (yarn's attention factor)."""

    def __init__(self, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> None:
        self.inv_freq = inv_freq
        self.scaling = scaling
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each (tokens, 1, head_dim / 2), of ``positions`` (tokens,)."""
        angles = (positions[:, None].float() * self.inv_freq)[:, None, :]
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of every head of ``x`` (tokens, heads, head_dim) against each other."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def frequencies(hf_config: Any, head_dim: int) -> tuple[Tensor, float]:
    """Return (inverse frequencies (head_dim / 2,) in float32, scaling) of a transformers configuration.

    The dynamic variant changes its frequencies beyond ``max_position_embeddings`` only, where nothing is served.

    Raises:
        ConfigError: a variant that is not supported.
    """
    parameters = hf_config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind not in _SUPPORTED or "rope_theta" not in parameters:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_SUPPORTED)}.")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported.")
    with torch.device("cpu"):  # also where a model is being built on the meta device
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        return inv_freq.float(), float(scaling)

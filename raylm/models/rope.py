"""Rotary position embeddings (Su et al. 2021), applied to all heads at once; scaled variants by transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.fields import Fields

_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10000.0


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
    """Rotate the halves of every head of ``x`` (tokens, heads, head_dim) against each other.

    In four operations: where a graph runs them they cost what launching them does, in every layer.
    """
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_left, out_right = rotated.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return rotated


def frequencies(fields: Fields, head_dim: int) -> tuple[Tensor, float]:
    """Return (inverse frequencies (head_dim / 2,) in float32, scaling) of a configuration, old style or new.

    The dynamic variant changes its frequencies beyond ``max_position_embeddings`` only, where nothing is served.

    Raises:
        ConfigError: a variant that is not supported.
    """
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise fields.error("rope_parameters", parameters, "an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SUPPORTED or any(isinstance(value, dict) for value in parameters.values()):
        raise ConfigError(f"config.json: the rotary embedding {kind!r} is not supported, only {', '.join(_SUPPORTED)}.")
    if parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError("config.json: a partial_rotary_factor other than 1 is not supported.")
    with torch.device("cpu"):  # also where a model is being built on the meta device
        if kind != "default":
            return _scaled(kind, fields)
        theta = parameters.get("rope_theta") or fields.get("rope_theta") or _DEFAULT_THETA
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (theta**exponents), 1.0


def _scaled(kind: str, fields: Fields) -> tuple[Tensor, float]:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    path = fields.checkpoint.path
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"config.json of {path}: the rotary embedding {kind!r} is incomplete: {error!r}") from error
    return inv_freq.float(), float(scaling)

"""A checkpoint's defaults for fields that a request leaves unset: sampling, maximum tokens, pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raylm.checkpoint import MOST, Checkpoint
from raylm.errors import ConfigError, InvalidRequestError
from raylm.params import PoolingParams, PoolingType, SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# The switches of sentence-transformers' 1_Pooling/config.json that are supported.
_POOLING_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """``pooling`` is the default of requests. ``size`` is the dimension of a vector, None if unknown."""

    pooling: PoolingType
    size: int | None

    def check(self, params: PoolingParams) -> None:
        """Raise InvalidRequestError if ``dimensions`` exceeds the size of a vector."""
        if params.dimensions is not None and self.size is not None and params.dimensions > self.size:
            message = f"dimensions must be at most {self.size}, the size of this model's vectors."
            raise InvalidRequestError(message, param="dimensions")


def pooling_defaults(checkpoint: Checkpoint) -> PoolingDefaults:
    """The checkpoint's pooling. Without a configuration, as for generative models, the last token is pooled."""
    wanted = [name for name, value in checkpoint.pooling_config.items() if name.startswith("pooling_mode_") and value]
    wanted = wanted or ["pooling_mode_lasttoken"]
    if len(wanted) > 1 or wanted[0] not in _POOLING_MODES:
        served = f"supported: one of {', '.join(_POOLING_MODES)}."
        raise ConfigError(f"model: 1_Pooling/config.json sets {', '.join(wanted)}; {served}")
    return PoolingDefaults(_POOLING_MODES[wanted[0]], checkpoint.hidden_size)


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sampling parameters that the checkpoint's generation_config.json sets."""
    found = checkpoint.generation_config
    defaults = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequestError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"model: generation_config.json holds a bad value: {error}") from error
    return defaults


def default_max_tokens(checkpoint: Checkpoint) -> int | None:
    """``max_new_tokens`` of the checkpoint's generation_config.json: the default of ``max_tokens``."""
    found = checkpoint.generation_config.get("max_new_tokens")
    if found is None or (type(found) is int and 1 <= found <= MOST):
        return found
    raise ConfigError("model: generation_config.json holds a bad value: max_new_tokens must be an integer from 1 on.")

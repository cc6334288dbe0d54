"""A checkpoint's defaults for fields that a request leaves unset: sampling, maximum tokens, pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raylm.checkpoint import MOST, Checkpoint, shown
from raylm.errors import ConfigError, InvalidRequestError
from raylm.params import PoolingParams, PoolingType, SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# The modes of sentence-transformers' 1_Pooling/config.json that are supported. Files of versions before 5.4 have a
# switch for each mode.
_POOLING_MODES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers' modules.json


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """``pooling`` is the default of requests. ``size`` is the dimension of a vector, None if unknown.

    A model that ``scores_pairs`` computes one number from two texts, and no vectors.
    """

    pooling: PoolingType
    size: int | None
    scores_pairs: bool = False

    def check(self, params: PoolingParams) -> None:
        """Raise InvalidRequestError for too many ``dimensions``, and for what the model does not compute."""
        if self.scores_pairs and params.pair_at is None:
            message = "This model scores pairs of texts and gives no vectors. Use /score or /rerank."
            raise InvalidRequestError(message, param="model")
        if params.pair_at is not None and not self.scores_pairs:
            raise InvalidRequestError("pair_at: only a cross-encoder scores pairs.", param="pair_at")
        if params.dimensions is not None and self.size is not None and params.dimensions > self.size:
            message = f"dimensions must be at most {self.size}, the size of this model's vectors."
            raise InvalidRequestError(message, param="dimensions")


def pooling_defaults(checkpoint: Checkpoint) -> PoolingDefaults:
    """The checkpoint's pooling.

    Without a configuration it is the mean for an encoder, as in sentence-transformers, else the last token.

    Raises:
        ConfigError: modules.json or 1_Pooling/config.json asks for something else.
    """
    for kind in checkpoint.sentence_modules:
        if kind.rpartition(".")[2] not in _MODULES:
            raise ConfigError(f"model: modules.json has {shown(kind)}; supported: {', '.join(_MODULES)}.")
    wanted = _pooling_modes(checkpoint.pooling_config) or ["mean" if checkpoint.encodes else "lasttoken"]
    if len(wanted) > 1 or wanted[0] not in _POOLING_MODES:
        served = f"supported: one of {', '.join(_POOLING_MODES)}."
        raise ConfigError(f"model: 1_Pooling/config.json sets {shown(', '.join(wanted))}; {served}")
    return PoolingDefaults(_POOLING_MODES[wanted[0]], checkpoint.hidden_size, checkpoint.encodes == "scores")


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """The modes of 1_Pooling/config.json: its ``pooling_mode``, or in older files the switches that are on."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(one) for one in mode] if isinstance(mode, list) else [str(mode)]
    return [_SWITCHES.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on]


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

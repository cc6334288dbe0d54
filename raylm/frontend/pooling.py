"""PoolingDefaults: how a checkpoint wants its hidden states pooled, and how long its vectors are."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError, InvalidRequestError
from raylm.params import PoolingParams, PoolingType

# The switches of sentence-transformers' 1_Pooling/config.json; what it can do beyond them is not served.
_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """``pooling`` where a request does not say; a vector has ``size`` numbers, None if unknown."""

    pooling: PoolingType
    size: int | None

    def check(self, params: PoolingParams) -> None:
        """Refuse more dimensions than a vector has.

        Raises:
            InvalidRequestError: naming ``dimensions``.
        """
        if params.dimensions is not None and self.size is not None and params.dimensions > self.size:
            raise InvalidRequestError(
                f"dimensions must be at most {self.size}, the size of this model's vectors.", param="dimensions"
            )


def pooling_defaults(checkpoint: Checkpoint) -> PoolingDefaults:
    """What the checkpoint says of pooling; one that says nothing, as generating ones do, has the last token pooled.

    Raises:
        ConfigError: it asks for a way of pooling that is not served.
    """
    wanted = [name for name, value in checkpoint.pooling_config.items() if name.startswith("pooling_mode_") and value]
    if not wanted:
        return PoolingDefaults("last", checkpoint.hidden_size)
    if len(wanted) > 1 or wanted[0] not in _MODES:
        raise ConfigError(
            f"model: 1_Pooling/config.json asks for {', '.join(wanted)}; one of {', '.join(_MODES)} is served."
        )
    return PoolingDefaults(_MODES[wanted[0]], checkpoint.hidden_size)

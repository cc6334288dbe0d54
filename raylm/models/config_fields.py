"""Fields: validated entries of a decoder's config.json. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any

from raylm.checkpoint import MOST, Checkpoint, shown
from raylm.errors import ConfigError

# transformers' defaults of missing entries.
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN: dict[str, Any] = {
    **_DEFAULTS, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
OUR_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {**_DEFAULTS, "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "attention_bias": False, "head_dim": 128},
}
_MOST = {"num_hidden_layers": 10_000}  # each layer needs names and objects
_LARGEST = sys.float_info.max


class Fields:
    """config.json with the ``defaults`` of its family. Methods except ``get`` raise ConfigError for invalid entries."""

    def __init__(self, checkpoint: Checkpoint, defaults: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self._values = {**defaults, **checkpoint.config}

    @classmethod
    def of(cls, architecture: str, checkpoint: Checkpoint) -> Fields:
        """Fields with the defaults of an architecture with RayLM's own class."""
        return cls(checkpoint, OUR_DEFAULTS[architecture])

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def size(self, name: str, *, least: int = 1, fallback: str | None = None) -> int:
        """An integer. If the entry is null or missing, reads the entry ``fallback``."""
        value = self.get(name)
        if value is None and fallback is not None:
            return self.size(fallback, least=least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, value, f"an integer from {least} on")
        if value > (most := _MOST.get(name, MOST)):
            raise self.error(name, value, f"at most {most}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def error(self, name: str, value: object, wanted: str) -> ConfigError:
        found = "is missing; it" if name not in self._values else f"is {shown(value)}; it"
        return ConfigError(f"config.json of {self.checkpoint}: {name} {found} must be {wanted}.")

"""Which class serves which architecture of config.json; a class is imported when a model asks for it."""

from __future__ import annotations

from importlib import import_module

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.causal_lm import CausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "raylm.models.llama",
    "MistralForCausalLM": "raylm.models.llama",
    "Qwen2ForCausalLM": "raylm.models.llama",
    "Qwen3ForCausalLM": "raylm.models.llama",
}


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """Find the class for a checkpoint.

    Raises:
        ConfigError: its architecture is not supported.
    """
    named = checkpoint.config.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ConfigError(
            f"model: the architecture {', '.join(map(str, named)) or '(none named)'} of {checkpoint.path} is not "
            f"supported; supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    found: type[CausalLM] = getattr(import_module(ARCHITECTURES[named[0]]), named[0])
    return found

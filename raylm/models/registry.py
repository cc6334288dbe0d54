"""Which class serves which architecture of config.json, and what serves quantized weights; imported when needed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.lazy import Family, member
from raylm.models.causal_lm import CausalLM
from raylm.models.linear import Quantization
from raylm.models.ranks import Ranks
from raylm.models.transformers_backend import TRANSFORMERS_ARCHITECTURES

ARCHITECTURES = {
    "LlamaForCausalLM": "raylm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "raylm.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "raylm.models.llama:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "raylm.models.llama:Qwen3ForCausalLM",
    **TRANSFORMERS_ARCHITECTURES,
}
# What chooses the formats of quantized weights: those of a checkpoint, or those that ``quantization`` asks for.
QUANTIZATION = Family[Callable[[Checkpoint, str | None, torch.device, Ranks], Quantization]]({
    "select": "raylm.models.quantization.select:select_quantization",
})  # fmt: skip


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class for a checkpoint; ConfigError where its architecture is not supported."""
    named = checkpoint.config.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ConfigError(
            f"model: the architecture {', '.join(map(str, named)) or '(none named)'} of {checkpoint.path} is not "
            f"supported; supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    found: type[CausalLM] = member(ARCHITECTURES[named[0]])
    return found

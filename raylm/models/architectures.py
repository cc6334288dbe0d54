"""Maps architectures of config.json to classes. Imports no torch."""

from __future__ import annotations

from raylm.checkpoint import Checkpoint, shown
from raylm.errors import ConfigError
from raylm.models.transformers_backend import TRANSFORMERS_ARCHITECTURES

GENERATIVE = {
    "LlamaForCausalLM": "raylm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "raylm.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "raylm.models.llama:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "raylm.models.llama:Qwen3ForCausalLM",
    **TRANSFORMERS_ARCHITECTURES,
}
ARCHITECTURES = {
    **GENERATIVE,
    "BertModel": "raylm.models.bert:BertModel",
    "BertForSequenceClassification": "raylm.models.bert:BertForSequenceClassification",
}


def architecture_of(checkpoint: Checkpoint) -> str:
    """The architecture that a checkpoint names. Raises ConfigError if it is not supported."""
    named = checkpoint.config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"config.json of {checkpoint}: architectures is {shown(named)}; it must list names.")
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ConfigError(
            f"model: the architecture {', '.join(named)[:200] or '(none named)'} of {checkpoint} is not "
            f"supported; supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    architecture: str = named[0]
    return architecture

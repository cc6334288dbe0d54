"""Which class serves which architecture of config.json; a class is imported when a model asks for it."""

from __future__ import annotations

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.lazy import member
from raylm.models.causal_lm import CausalLM

UNIVERSAL = "raylm.models.transformers_backend.model:UniversalForCausalLM"
_COMPACT = {
    "LlamaForCausalLM": "raylm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "raylm.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "raylm.models.llama:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "raylm.models.llama:Qwen3ForCausalLM",
}
# Each was found to agree with transformers; docs/models.md has by how much.
_BY_TRANSFORMERS = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BeamForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "HYV3ForCausalLM",
    "Jais2ForCausalLM",
    "JetMoeForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MellumForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MixtralForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "OlmoForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
)
ARCHITECTURES = _COMPACT | dict.fromkeys(_BY_TRANSFORMERS, UNIVERSAL)


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
    found: type[CausalLM] = member(ARCHITECTURES[named[0]])
    return found

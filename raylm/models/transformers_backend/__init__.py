"""Runs transformers' modeling code with paged attention. Lists the architectures that were verified.

docs/models.md has the differences measured.
"""

TRANSFORMERS_BACKEND = "raylm.models.transformers_backend.model:TransformersForCausalLM"
TRANSFORMERS_ARCHITECTURES = dict.fromkeys((
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BeamForCausalLM", "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM", "CohereForCausalLM", "CwmForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "ExaoneMoeForCausalLM", "FlexOlmoForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GlmForCausalLM",
    "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM", "HeliumForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM", "HYV3ForCausalLM", "Jais2ForCausalLM", "JetMoeForCausalLM", "Kolibri1ForCausalLM",
    "LagunaForCausalLM", "MellumForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MinistralForCausalLM",
    "MixtralForCausalLM", "NanoChatForCausalLM", "NemotronForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "OlmoeForCausalLM", "OlmoForCausalLM", "OPTForCausalLM", "PersimmonForCausalLM", "Phi3ForCausalLM",
    "PhiForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
), TRANSFORMERS_BACKEND)  # fmt: skip

"""Language models: load one, what its attention is, and LoRA adapters for it."""

from raylm.models.causal_lm import AttentionSpec, CausalLM
from raylm.models.loader import load_model, resolve_dtype
from raylm.models.lora.adapter_files import LowRank, read_adapter
from raylm.models.lora.low_rank import LowRankLayers, ModuleAdapter, adaptable_shapes, pack_native
from raylm.models.native_decoder import heads_struct
from raylm.models.ranks import SINGLE_RANK, Ranks
from raylm.native import AdapterRun

__all__ = [
    "SINGLE_RANK",
    "AdapterRun",
    "AttentionSpec",
    "CausalLM",
    "LowRank",
    "LowRankLayers",
    "ModuleAdapter",
    "Ranks",
    "adaptable_shapes",
    "heads_struct",
    "load_model",
    "pack_native",
    "read_adapter",
    "resolve_dtype",
]

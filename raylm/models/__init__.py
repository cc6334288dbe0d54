"""Front door of the models: load one, and what a model says of its attention."""

from raylm.models.causal_lm import CausalLM
from raylm.models.layers import AttentionSpec
from raylm.models.loader import load_model, resolve_dtype
from raylm.models.lora.adapter_files import LowRank, read_adapter
from raylm.models.lora.low_rank import AdapterRun, LowRankLayers, ModuleAdapter, adaptable_shapes, pack_native
from raylm.models.native_decoder import heads_struct
from raylm.models.ranks import ALONE, Ranks

__all__ = [
    "ALONE",
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

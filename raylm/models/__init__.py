"""Language models: loading, their attention, and LoRA adapters. torch is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.models.causal_lm import AttentionSpec as AttentionSpec
    from raylm.models.causal_lm import CausalLM as CausalLM
    from raylm.models.checkpoint_check import check_checkpoint as check_checkpoint
    from raylm.models.elementwise import FP8 as FP8
    from raylm.models.elementwise import KVPlaces as KVPlaces
    from raylm.models.encoder import Encoder as Encoder
    from raylm.models.gpu.dependent_launch import early as early
    from raylm.models.gpu.dependent_launch import wait_for_previous as wait_for_previous
    from raylm.models.kv_scales import with_kv_scales as with_kv_scales
    from raylm.models.loader import load_model as load_model
    from raylm.models.loader import outline as outline
    from raylm.models.loader import resolve_dtype as resolve_dtype
    from raylm.models.lora import AdapterLimits as AdapterLimits
    from raylm.models.lora import LowRank as LowRank
    from raylm.models.lora import LowRankLayers as LowRankLayers
    from raylm.models.lora import adaptable_shapes as adaptable_shapes
    from raylm.models.lora import low_rank_layers as low_rank_layers
    from raylm.models.lora import pack_native as pack_native
    from raylm.models.lora import read_adapter as read_adapter
    from raylm.models.lora import read_adapter_with_digest as read_adapter_with_digest
    from raylm.models.native_decoder import heads_struct as heads_struct
    from raylm.models.ranks import SINGLE_RANK as SINGLE_RANK
    from raylm.models.ranks import PipelineStage as PipelineStage
    from raylm.models.ranks import Ranks as Ranks
    from raylm.models.ranks import SingleRank as SingleRank

_MODULES = {
    "causal_lm": ("AttentionSpec", "CausalLM"),
    "checkpoint_check": ("check_checkpoint",),
    "elementwise": ("FP8", "KVPlaces"),
    "encoder": ("Encoder",),
    "gpu.dependent_launch": ("early", "wait_for_previous"),
    "kv_scales": ("with_kv_scales",),
    "loader": ("load_model", "outline", "resolve_dtype"),
    "lora": (
        "AdapterLimits", "LowRank", "LowRankLayers", "adaptable_shapes", "low_rank_layers",
        "pack_native", "read_adapter", "read_adapter_with_digest",
    ),
    "native_decoder": ("heads_struct",),
    "ranks": ("SINGLE_RANK", "PipelineStage", "Ranks", "SingleRank"),
}  # fmt: skip
__getattr__ = front_door(__name__, _MODULES)

"""Front door of the models: load one, and what a model says of its attention."""

from raylm.models.causal_lm import CausalLM
from raylm.models.layers import AttentionSpec
from raylm.models.loader import load_model, resolve_dtype
from raylm.models.native_decoder import heads_struct
from raylm.models.ranks import ALONE, Ranks

__all__ = ["ALONE", "AttentionSpec", "CausalLM", "Ranks", "heads_struct", "load_model", "resolve_dtype"]

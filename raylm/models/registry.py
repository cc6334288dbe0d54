"""Which class serves which architecture of config.json, and what serves quantized weights; imported when needed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raylm.checkpoint import Checkpoint
from raylm.lazy import Family, member
from raylm.models.architectures import ARCHITECTURES, architecture_of
from raylm.models.causal_lm import CausalLM
from raylm.models.linear import Quantization
from raylm.models.ranks import Ranks

# What chooses the formats of quantized weights: those of a checkpoint, or those that ``quantization`` asks for.
QUANTIZATION = Family[Callable[[Checkpoint, str | None, torch.device, Ranks], Quantization]]({
    "select": "raylm.models.quantization.select:select_quantization",
})  # fmt: skip


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class for a checkpoint; ConfigError where its architecture is not supported."""
    found: type[CausalLM] = member(ARCHITECTURES[architecture_of(checkpoint)])
    return found

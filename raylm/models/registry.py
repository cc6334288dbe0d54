"""Finds the class of an architecture and the code for quantized weights. Imported when needed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raylm.checkpoint import Checkpoint
from raylm.lazy import Family, member
from raylm.models.architectures import ARCHITECTURES, architecture_of
from raylm.models.causal_lm import CausalLM
from raylm.models.linear import Quantization
from raylm.models.ranks import Ranks

# Selects the formats of quantized weights, from the checkpoint or from the knob ``quantization``.
QUANTIZATION = Family[Callable[[Checkpoint, str | None, torch.device, Ranks], Quantization]]({
    "select": "raylm.models.quantization.select:select_quantization",
})  # fmt: skip


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class for a checkpoint. Raises ConfigError if its architecture is not supported."""
    found: type[CausalLM] = member(ARCHITECTURES[architecture_of(checkpoint)])
    return found

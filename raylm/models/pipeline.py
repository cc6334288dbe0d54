"""Pipeline parallelism of the Llama families: the layers of each stage (Huang et al. 2019, GPipe).

A stage has consecutive layers. It passes the residual stream to the next stage without rounding it, so the tokens are
those of a single worker, bit for bit.
"""

from __future__ import annotations

import re
from dataclasses import replace

from raylm.errors import ConfigError
from raylm.models.decoder_config import DecoderConfig
from raylm.models.ranks import PipelineStage

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def place(whole: DecoderConfig, stage: PipelineStage) -> DecoderConfig:
    """The configuration with the layers of ``stage``. Raises ConfigError if there are fewer layers than stages."""
    total = len(whole.layers)
    if stage.count > total:
        raise ConfigError(f"engine.pipeline_parallel_size: {stage.count} stages cannot share {total} layers.")
    heads = 2 * whole.num_heads + 2 * whole.num_kv_heads
    layer = whole.hidden_size * (heads * whole.head_dim + 3 * whole.intermediate_size)
    return replace(whole, layers=stage.layers(total, whole.vocab_size * whole.hidden_size / layer))


def has_embedding(config: DecoderConfig) -> bool:
    """Whether this stage has the embedding, to begin with or, if it is tied, as its head."""
    stage = config.ranks.stage
    return stage.is_first or (stage.is_last and config.tied)


def is_elsewhere(name: str, config: DecoderConfig) -> bool:
    """Whether another stage has the tensor ``name`` of the checkpoint."""
    stage = config.ranks.stage
    if match := _LAYER.match(name):
        return int(match[1]) < len(config.windows) and int(match[1]) not in config.layers
    if name.startswith("model.embed_tokens."):
        return not has_embedding(config)
    return name.startswith(("model.norm.", "lm_head.")) and not stage.is_last

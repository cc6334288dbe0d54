"""MemoryForecast: the decisions that a worker would make at start on this machine, without reading weights.

They are made by the same functions as at start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raylm.checkpoint import Checkpoint
from raylm.config import Config
from raylm.models import outline, resolve_dtype
from raylm.worker.attention import select_backend
from raylm.worker.kv_cache import KVCacheSize, block_bytes, free_memory, size_pool, useful_blocks
from raylm.worker.startup import available_threads, block_size_of, check_extras, resolve_device, useful_threads


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The decisions of a worker. ``weights_bytes`` is the size in the served dtype, ``slower`` the warnings logged."""

    device: str
    dtype: str
    quantization: str | None
    attention_backend: str
    threads: int
    weights_bytes: int
    block_size: int
    pool: KVCacheSize
    why: str
    slower: list[str]


def torch_build() -> tuple[str, str | None]:
    """(version of torch, version of CUDA that it was built for, or None)."""
    return torch.__version__, torch.version.cuda


def forecast_pool(config: Config, checkpoint: Checkpoint, device_name: str) -> MemoryForecast:
    """The forecast for one rank with the whole model, before a profile run. ``device_name`` is as the knob ``device``.

    Raises:
        ConfigError: a worker would reject the configuration.
    """
    with _warnings() as slower:
        device = resolve_device(device_name)
        check_extras(config, device)
        dtype = resolve_dtype(checkpoint, config.dtype, device)
        model = outline(checkpoint, dtype, device, config.quantization)
        weights = sum(target.nbytes for target in model.targets().values())
        size = block_size_of(config, device)
        fp8, attention = config.cache.dtype == "fp8", config.engine.attention_backend
        backend = select_backend(model.attention_specs, dtype, device, size, fp8=fp8, asked=attention)
        each = block_bytes(backend, model.attention_specs, size, dtype)
        free, default = free_memory(device, weights, config.engine.tensor_parallel_size, config.engine.max_replicas)
        pool = size_pool(config, size, each, free, default, checkpoint.max_position_embeddings)
    threads = config.engine.threads or useful_threads(available_threads(config.engine), weights)
    why = _why(config, pool, size, checkpoint.max_position_embeddings)
    name = str(dtype).removeprefix("torch.")
    return MemoryForecast(
        device.type, name, model.quantization, backend.name, threads, weights, size, pool, why, slower
    )  # fmt: skip


def _why(config: Config, pool: KVCacheSize, size: int, model_limit: int | None) -> str:
    """The reason for the size of the pool, as text."""
    if config.cache.num_blocks is not None:
        return "as cache.num_blocks says"
    if config.cache.memory_gib is not None:
        return "as cache.memory_gib says"
    longest = config.max_model_len or model_limit
    if longest is not None and pool.num_blocks == useful_blocks(config, size, longest):
        return f"all that {config.scheduler.max_num_seqs} sequences of {longest:,} tokens and the prefix cache can use"
    return "a share of the free memory; cache.memory_gib asks for more"


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that raylm logs inside the context. They are not logged elsewhere."""
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = logging.getLogger("raylm"), Keep(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate

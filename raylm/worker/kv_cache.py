"""How large the pool of KV blocks becomes, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from raylm.config import CacheConfig, Config
from raylm.errors import ConfigError
from raylm.models import AttentionSpec
from raylm.native import huge_empty
from raylm.worker.attention import AnyBackend
from raylm.worker.cgroup import available_memory

GIB = 1 << 30
_CPU_SHARE, _CPU_MOST = 0.4, 4 * GIB
_CUDA_SHARE = 0.9
_CACHED_SEQS = 16


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """``num_blocks`` of ``block_bytes`` each, over all layers; ``max_model_len`` in tokens."""

    num_blocks: int
    block_bytes: int
    max_model_len: int


def block_bytes(backend: type[AnyBackend], specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Of all layers of a model of ``dtype``."""
    each = (backend.kv_dtype or dtype).itemsize
    return sum(prod(backend.kv_cache_shape(1, block_size, spec)) for spec in specs) * each


def allocate(
    backend: type[AnyBackend],
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """One uninitialized tensor a layer; on a CPU the system gives the memory when it is first written.

    ``dtype`` is the model's, and theirs unless the backend has one of its own.
    """
    dtype = backend.kv_dtype or dtype
    shapes = [backend.kv_cache_shape(num_blocks, block_size, spec) for spec in specs]
    if device.type == "cpu":
        return [huge_empty(shape, dtype) for shape in shapes]
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def useful_blocks(config: Config, block_size: int, longest: int) -> int:
    """The most blocks that sequences of at most ``longest`` tokens have a use for.

    All ``max_num_seqs`` of them at full length, each with the block to grow by that the scheduler keeps free; beside
    them, where prefixes are cached, 16 that have ended, as what runs at full length leaves no room for the others' next
    turns. A fixed number: how many prefixes come back does not depend on how many sequences share a step.
    """
    each = -(-longest // block_size)
    return config.scheduler.max_num_seqs * (each + 1) + _CACHED_SEQS * each * config.cache.prefix_caching


def size_pool(
    config: Config, block_size: int, block_bytes: int, free: int, default: int, model_limit: int | None
) -> KVCacheSize:
    """Decide blocks (of ``block_size`` tokens and ``block_bytes``) and longest sequence from ``free`` bytes.

    Unless configured the pool has the ``useful_blocks`` that fit into ``default`` bytes. ``model_limit`` is the number
    of positions the model was made for, None if unknown.
    """
    asked, size = config.max_model_len, block_size
    if asked is not None and model_limit is not None and asked > model_limit:
        raise ConfigError(f"max_model_len: {asked} exceeds the {model_limit} positions that the model was made for.")
    longest = asked or model_limit
    default_blocks = max(0, default) // block_bytes
    if longest is not None:
        default_blocks = min(default_blocks, useful_blocks(config, block_size, longest))
    num_blocks = _num_blocks(config.cache, block_bytes, free, default_blocks)
    if num_blocks < 2:
        raise ConfigError(
            f"cache: {free / GIB:.2f} GiB are free, {num_blocks * block_bytes / GIB:.2f} GiB would go to the KV cache; "
            f"its smallest pool, 2 blocks, takes {2 * block_bytes / GIB:.3f} GiB."
        )
    if asked is not None and asked > num_blocks * size:
        raise ConfigError(
            f"max_model_len: {asked} tokens take {-(-asked // size) * block_bytes / GIB:.2f} GiB of KV cache, but it "
            f"has {num_blocks * block_bytes / GIB:.2f} GiB, which fit {num_blocks * size} tokens."
        )
    return KVCacheSize(num_blocks, block_bytes, min(longest or num_blocks * size, num_blocks * size))


def _num_blocks(cache: CacheConfig, block_bytes: int, free: int, default: int) -> int:
    """Of ``free`` bytes; ``default`` blocks if nothing is configured."""
    if cache.num_blocks is not None and cache.memory_gib is not None:
        raise ConfigError("cache: num_blocks and memory_gib exclude each other.")
    if cache.num_blocks is not None:
        named, asked = "cache.num_blocks", cache.num_blocks
    elif cache.memory_gib is not None:
        named, asked = "cache.memory_gib", int(cache.memory_gib * GIB) // block_bytes
    else:
        return default
    if asked * block_bytes > free:
        raise ConfigError(
            f"{named}: a pool of {asked * block_bytes / GIB:.2f} GiB is asked for, {free / GIB:.2f} GiB are free."
        )
    return asked


def free_memory(device: torch.device, activations: int, ranks: int, engines: int) -> list[int]:
    """Bytes that a pool may take beside ``activations`` bytes of a step, and the most it takes by default.

    Each rank has a GPU of its own; on CPUs all ``ranks`` share the machine's memory. There all ``engines`` of the
    application may start on one node at the same moment, and each sees the memory that the others will write later: the
    default is an equal part of the share.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0] - activations
        return [free, int(free * _CUDA_SHARE)]
    free = available_memory() // ranks - activations
    return [free, min(_CPU_MOST, int(free * _CPU_SHARE / engines))]

"""The size of the pool of KV blocks, and its tensors."""

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
    """The pool has ``num_blocks`` of ``block_bytes`` each, over all layers. ``max_model_len`` is in tokens."""

    num_blocks: int
    block_bytes: int
    max_model_len: int


def block_bytes(backend: type[AnyBackend], specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers of a model of ``dtype``."""
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
    """Allocate one uninitialized tensor per layer. On a CPU the system provides the memory on the first write.

    ``dtype`` is the model's. The tensors have it too, unless the backend has its own ``kv_dtype``.
    """
    dtype = backend.kv_dtype or dtype
    shapes = [backend.kv_cache_shape(num_blocks, block_size, spec) for spec in specs]
    if device.type == "cpu":
        return [huge_empty(shape, dtype) for shape in shapes]
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def useful_blocks(config: Config, block_size: int, longest: int) -> int:
    """The most blocks that sequences of at most ``longest`` tokens can use.

    The pool holds ``max_num_seqs`` sequences of full length, each with one more block that the scheduler keeps free for
    growth. With prefix caching it also holds 16 ended sequences, because running sequences of full length would leave
    no room for the prefixes of next turns. The 16 is fixed: the number of reused prefixes does not depend on how many
    sequences share a step.
    """
    each = -(-longest // block_size)
    return config.scheduler.max_num_seqs * (each + 1) + _CACHED_SEQS * each * config.cache.prefix_caching


def size_pool(
    config: Config, block_size: int, block_bytes: int, free: int, default: int, model_limit: int | None
) -> KVCacheSize:
    """Compute the number of blocks (of ``block_size`` tokens, ``block_bytes`` each) and the longest sequence.

    By default the pool has ``useful_blocks``, as many as fit in ``default`` bytes; a configured pool must fit in
    ``free`` bytes. ``model_limit`` is the number of positions of the model, None if unknown.

    Raises:
        ConfigError: the pool does not fit, or holds fewer than 2 blocks or than ``max_model_len`` tokens.
    """
    asked, size = config.max_model_len, block_size
    if asked is not None and model_limit is not None and asked > model_limit:
        raise ConfigError(f"max_model_len: {asked} exceeds the {model_limit} positions of the model.")
    longest = asked or model_limit
    if block_bytes == 0:
        return _without_cache(config, size, longest)
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


def _without_cache(config: Config, block_size: int, longest: int | None) -> KVCacheSize:
    """The blocks of an encoder take no memory. They count the tokens of prompts that wait for their last chunk."""
    if config.cache.memory_gib is not None:
        raise ConfigError("cache.memory_gib: an encoder has no KV cache; omit it.")
    assert longest is not None, "an encoder has a table of positions"
    blocks = config.cache.num_blocks or useful_blocks(config, block_size, longest)
    return KVCacheSize(blocks, 0, min(longest, blocks * block_size))


def _num_blocks(cache: CacheConfig, block_bytes: int, free: int, default: int) -> int:
    """The configured number of blocks, which must fit in ``free`` bytes; ``default`` if none is configured."""
    if cache.num_blocks is not None and cache.memory_gib is not None:
        raise ConfigError("cache: num_blocks and memory_gib cannot both be set.")
    if cache.num_blocks is not None:
        named, asked = "cache.num_blocks", cache.num_blocks
    elif cache.memory_gib is not None:
        named, asked = "cache.memory_gib", int(cache.memory_gib * GIB) // block_bytes
    else:
        return default
    if asked * block_bytes > free:
        raise ConfigError(
            f"{named}: a pool of {asked * block_bytes / GIB:.2f} GiB is requested, {free / GIB:.2f} GiB are free."
        )
    return asked


def free_memory(device: torch.device, activations: int, ranks: int, engines: int) -> list[int]:
    """[bytes available for a pool beside ``activations`` bytes of a step, most bytes of a pool by default].

    On GPUs each rank has its own. On CPUs all ``ranks`` share the machine's memory, and all ``engines`` of the
    application may start on one node at once, when each still sees the memory that the others will write later.
    Therefore the default share is divided equally among the engines.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0] - activations
        return [free, int(free * _CUDA_SHARE)]
    free = available_memory() // ranks - activations
    return [free, min(_CPU_MOST, int(free * _CPU_SHARE / engines))]

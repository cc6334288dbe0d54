"""Worker: the stages from a configuration to a model runner that can take its first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raylm.checkpoint import Checkpoint, resolve
from raylm.config import Config, EngineConfig
from raylm.errors import ConfigError
from raylm.messages import WorkerInfo
from raylm.models import CausalLM, Ranks, load_model, resolve_dtype
from raylm.native import use_threads
from raylm.worker.attention import AnyBackend, StepLimits, select_backend
from raylm.worker.cgroup import available_cores
from raylm.worker.distributed.process_group import join_ranks
from raylm.worker.distributed.rank_sampler import select_sampler
from raylm.worker.distributed.rendezvous import Rendezvous
from raylm.worker.forward import ModuleForward, select_forward
from raylm.worker.gpu.async_decode import create_async_decode
from raylm.worker.gpu.cuda_graphs import CudaCapture, GraphForward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import KVCacheSize, allocate, block_bytes, free_memory, size_pool
from raylm.worker.lora import create_adapters
from raylm.worker.memory import largest_step, loading
from raylm.worker.model_runner import ModelRunner
from raylm.worker.profile_run import profile_run
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.structured_outputs import Grammars
from raylm.worker.speculation.speculator import create_speculator

logger = logging.getLogger(__name__)

_WEIGHTS_BYTES_A_THREAD = 64 << 20  # about 5 ms of reading for one core


class Stages:
    """Collects (name, seconds) of what ran under it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.done.append((name, time.perf_counter() - started))


@dataclass(frozen=True, slots=True)
class _Host:
    """Where this rank computes, and with whom."""

    device: torch.device
    ranks: Ranks
    sampler: Sampler
    most_threads: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The model with its weights, and what attends for it."""

    checkpoint: Checkpoint
    model: CausalLM
    dtype: torch.dtype
    weights_bytes: int
    threads: int
    backend: type[AnyBackend]
    grammars: Grammars


@dataclass(frozen=True, slots=True)
class _Memory:
    """The KV pool."""

    pool: KVCacheSize
    kv_caches: list[torch.Tensor]
    bytes_each: int
    with_graphs: bool


@torch.inference_mode()
def start_runner(config: Config, rendezvous: Rendezvous | None = None) -> tuple[ModelRunner, WorkerInfo]:
    """Meet the other ranks, load the weights, profile, allocate the KV pool.

    Raises:
        ConfigError: the model cannot be served as configured.
        PeerLostError: another rank is gone.
    """
    stages = Stages()
    host = _meet(config, rendezvous or Rendezvous())
    if host.device.type == "cpu":
        with stages("native kernels"):
            use_threads(host.most_threads)
    with stages("load weights"):
        loaded = _load(config, host)
    with stages("profile run"):
        activations = _profile(config, host, loaded)
    with stages("allocate KV cache"):
        memory = _allocate(config, host, loaded, activations)
        runner = _runner(config, host, loaded, memory)
    if isinstance(runner.forward, GraphForward):
        with stages("capture CUDA graphs"):
            runner.forward.capture_at_start()
    return runner, WorkerInfo(
        num_blocks=memory.pool.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=memory.pool.max_model_len,
        vocab_size=loaded.model.vocab_size,
        device=str(host.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention_backend=loaded.backend.name,
        threads=loaded.threads,
        weights_bytes=loaded.weights_bytes,
        kv_cache_bytes=memory.pool.num_blocks * memory.bytes_each,
        stages=stages.done,
        quantization=loaded.model.quantization,
        tensor_parallel_size=host.ranks.world_size,
    )


def _meet(config: Config, rendezvous: Rendezvous) -> _Host:
    torch.set_num_threads(most_threads := available_threads(config.engine))
    device = resolve_device(config.device)
    ranks = join_ranks(rendezvous, config.engine.tensor_parallel_size, device)
    return _Host(device, ranks, select_sampler(ranks), most_threads)


def _load(config: Config, host: _Host) -> _Loaded:
    checkpoint = resolve(config.model, config.revision)
    dtype = resolve_dtype(checkpoint, config.dtype, host.device)
    with loading(checkpoint, host.device):
        model, weights_bytes = load_model(checkpoint, dtype, host.device, config.quantization, host.ranks)
    threads = config.engine.threads or useful_threads(host.most_threads, weights_bytes)
    torch.set_num_threads(threads)
    if host.device.type == "cpu":
        use_threads(threads)
    backend = select_backend(model.attention_specs, dtype, host.device, config.cache.block_size)
    grammars = Grammars(checkpoint.path, checkpoint.eos_token_ids, model.vocab_size)  # reads the vocabulary meanwhile
    return _Loaded(checkpoint, model, dtype, weights_bytes, threads, backend, grammars)


def _profile(config: Config, host: _Host, loaded: _Loaded) -> int:
    """Bytes that the largest step takes beside weights and KV cache."""
    limits = _limits(config, loaded.checkpoint.max_position_embeddings)
    longest = loaded.checkpoint.max_position_embeddings or limits.max_num_tokens

    def run(step: StepLimits) -> int:
        return profile_run(loaded.model, loaded.backend, step, longest, loaded.dtype, host.device, host.sampler)

    return largest_step(run, limits)


def _allocate(config: Config, host: _Host, loaded: _Loaded, activations: int) -> _Memory:
    model, backend, size = loaded.model, loaded.backend, config.cache.block_size
    bytes_each = block_bytes(backend, model.attention_specs, size, loaded.dtype)
    free, default = host.ranks.all_reduce_min(free_memory(host.device, activations, host.ranks.world_size))
    pool = size_pool(config, bytes_each, free, default, loaded.checkpoint.max_position_embeddings)
    capturable = backend.capturable and model.capturable
    with_graphs = host.device.type == "cuda" and capturable and _wants_graphs(config.engine)
    num_blocks = pool.num_blocks + with_graphs  # their scratch block is behind the scheduler's
    kv_caches = allocate(backend, model.attention_specs, num_blocks, size, loaded.dtype, host.device)
    return _Memory(pool, kv_caches, bytes_each, with_graphs)


def _runner(config: Config, host: _Host, loaded: _Loaded, memory: _Memory) -> ModelRunner:
    model, device, longest = loaded.model, host.device, memory.pool.max_model_len
    guesses, limits = config.scheduler.speculative_tokens, _limits(config, longest)
    batch = InputBatch(limits.max_num_seqs, longest, limits.block_size, model.vocab_size, device, loaded.grammars)
    forward = select_forward(model, loaded.backend, memory.kv_caches, limits)
    if memory.with_graphs and isinstance(forward, ModuleForward):
        forward = GraphForward(forward, limits, memory.pool.num_blocks, device, CudaCapture())
    # What is left to torch beside native products and attention is small: waking its threads takes longer.
    is_native = loaded.backend.name == "cpu" and not model.torch_multiplies
    torch.set_num_threads(loaded.threads if isinstance(forward, ModuleForward) and not is_native else 1)
    return ModelRunner(
        forward,
        batch,
        InputBuffers(limits, device),
        create_speculator(limits, longest, guesses),
        host.sampler,
        create_async_decode(limits, device, alone=host.ranks.world_size == 1 and not guesses),
        create_adapters(config.lora, model, forward, limits.max_num_seqs),
    )


def resolve_device(asked: str) -> torch.device:
    """The device that ``asked`` ('auto', 'cpu' or 'cuda') means on this machine.

    Raises:
        ConfigError: there is no such device.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is asked for, but torch sees no NVIDIA GPU; use auto or cpu.")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def available_threads(engine: EngineConfig) -> int:
    """Threads for a rank: those asked for, else its share of the cores; other actors get their turns between phases."""
    return engine.threads or max(1, available_cores() // engine.tensor_parallel_size)


def useful_threads(most: int, weights_bytes: int) -> int:
    """Threads that a step is worth: each needs weights to read, or it only makes the others wait for it."""
    return min(most, max(1, weights_bytes // _WEIGHTS_BYTES_A_THREAD))


def _wants_graphs(engine: EngineConfig) -> bool:
    """Whether steps are captured; not between ranks, where one without memory for a graph would lose the others."""
    if engine.cuda_graphs and engine.tensor_parallel_size > 1:
        logger.warning("Steps run without CUDA graphs, and slower: several ranks share each of them.")
        return False
    return engine.cuda_graphs


def _limits(config: Config, max_model_len: int | None) -> StepLimits:
    scheduler, size = config.scheduler, config.cache.block_size
    longest = max_model_len or scheduler.max_num_batched_tokens
    return StepLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-longest // size), size)

"""Worker: the stages from a configuration to a model runner that can take its first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raylm.checkpoint import resolve
from raylm.config import Config, EngineConfig
from raylm.errors import ConfigError
from raylm.messages import WorkerInfo
from raylm.models import load_model, resolve_dtype
from raylm.native import use_threads
from raylm.worker.attention import StepLimits, select_backend
from raylm.worker.device_feed import create_feed
from raylm.worker.forward import ModuleForward, select_forward
from raylm.worker.graph_forward import CudaCapture, GraphForward
from raylm.worker.host import available_cores
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import allocate, block_bytes, free_memory, size_pool
from raylm.worker.lora import create_adapters
from raylm.worker.meeting import Meeting
from raylm.worker.memory import largest_step, loading
from raylm.worker.model_runner import ModelRunner
from raylm.worker.process_group import join_ranks
from raylm.worker.profile_run import profile_run
from raylm.worker.rank_sampler import select_sampler
from raylm.worker.speculator import create_speculator
from raylm.worker.structured_outputs import Grammars

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


@torch.inference_mode()
def start_runner(config: Config, meeting: Meeting | None = None) -> tuple[ModelRunner, WorkerInfo]:
    """Meet the other ranks, load the weights, profile, allocate the KV pool.

    Raises:
        ConfigError: the model cannot be served as configured.
        PeerLostError: another rank is gone.
    """
    stages, size = Stages(), config.cache.block_size
    torch.set_num_threads(most_threads := available_threads(config.engine))
    device = resolve_device(config.device)
    ranks = join_ranks(meeting or Meeting(), config.engine.tensor_parallel_size, device)
    sampler = select_sampler(ranks)
    if device.type == "cpu":
        with stages("native kernels"):
            use_threads(most_threads)
    with stages("load weights"):
        checkpoint = resolve(config.model, config.revision)
        dtype = resolve_dtype(checkpoint, config.dtype, device)
        with loading(checkpoint, device):
            model, weights_bytes = load_model(checkpoint, dtype, device, config.quantization, ranks)
    grammars = Grammars(checkpoint.path, checkpoint.eos_token_ids, model.vocab_size)
    threads = config.engine.threads or useful_threads(most_threads, weights_bytes)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        use_threads(threads)
    backend = select_backend(model.attention_specs, dtype, device, size)
    with stages("profile run"):
        limits = _limits(config, checkpoint.max_position_embeddings)
        longest = checkpoint.max_position_embeddings or limits.max_num_tokens
        activations = largest_step(
            lambda step: profile_run(model, backend, step, longest, dtype, device, sampler), limits
        )
    with stages("allocate KV cache"):
        bytes_each = block_bytes(backend, model.attention_specs, size, dtype)
        free, default = ranks.least(free_memory(device, activations, ranks.size))
        pool = size_pool(config, bytes_each, free, default, checkpoint.max_position_embeddings)
        capturable = backend.capturable and model.capturable
        with_graphs = device.type == "cuda" and capturable and _wants_graphs(config.engine)
        num_blocks = pool.num_blocks + with_graphs  # their scratch block is behind the scheduler's
        kv_caches = allocate(backend, model.attention_specs, num_blocks, size, dtype, device)
        limits = _limits(config, pool.max_model_len)
        vocab_size = model.vocab_size
        batch = InputBatch(limits.max_num_seqs, pool.max_model_len, size, vocab_size, device, grammars)
        speculator = create_speculator(limits, pool.max_model_len, config.scheduler.speculative_tokens)
        forward = select_forward(model, backend, kv_caches, limits)
        if with_graphs and isinstance(forward, ModuleForward):
            forward = GraphForward(forward, limits, pool.num_blocks, device, CudaCapture())
        # What is left to torch beside native products and attention is small: waking its threads takes longer.
        is_native = backend.name == "cpu" and not model.torch_multiplies
        torch.set_num_threads(threads if isinstance(forward, ModuleForward) and not is_native else 1)
        feed = create_feed(limits, device, alone=ranks.size == 1 and not config.scheduler.speculative_tokens)
        adapters = create_adapters(config.lora, model, forward, limits.max_num_seqs)
        runner = ModelRunner(forward, batch, InputBuffers(limits, device), speculator, sampler, feed, adapters)
    if isinstance(forward, GraphForward):
        with stages("capture CUDA graphs"):
            forward.capture_at_start()
    return runner, WorkerInfo(
        num_blocks=pool.num_blocks,
        block_size=size,
        max_model_len=pool.max_model_len,
        vocab_size=vocab_size,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=backend.name,
        threads=threads,
        weights_bytes=weights_bytes,
        kv_cache_bytes=pool.num_blocks * bytes_each,
        stages=stages.done,
        quantization=model.quantization,
        tensor_parallel_size=ranks.size,
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

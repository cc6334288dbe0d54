"""Worker: the stages from a configuration to a model runner that can take its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.messages import WorkerInfo
from raylm.models import load_model, resolve_dtype
from raylm.native import use_threads
from raylm.worker.attention import StepLimits, select_backend
from raylm.worker.forward import ModuleForward, select_forward
from raylm.worker.graph_forward import CudaCapture, GraphForward
from raylm.worker.host import available_cores
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import allocate, block_bytes, free_memory, size_pool
from raylm.worker.memory import largest_step, loading
from raylm.worker.model_runner import ModelRunner
from raylm.worker.profile_run import profile_run
from raylm.worker.speculator import create_speculator

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
def start_runner(config: Config) -> tuple[ModelRunner, WorkerInfo]:
    """Load the weights, profile, allocate the KV pool.

    Raises:
        ConfigError: the model cannot be served as configured.
    """
    stages, size = Stages(), config.cache.block_size
    torch.set_num_threads(most_threads := available_threads(config.engine.threads))
    device = resolve_device(config.device)
    if device.type == "cpu":
        with stages("native kernels"):
            use_threads(most_threads)
    with stages("load weights"):
        checkpoint = resolve(config.model, config.revision)
        dtype = resolve_dtype(checkpoint, config.dtype, device)
        with loading(checkpoint, device):
            model, weights_bytes = load_model(checkpoint, dtype, device, config.quantization)
    threads = config.engine.threads or useful_threads(most_threads, weights_bytes)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        use_threads(threads)
    backend = select_backend(model.attention_specs, dtype, device, size)
    with stages("profile run"):
        limits = _limits(config, checkpoint.max_position_embeddings)
        longest = checkpoint.max_position_embeddings or limits.max_num_tokens
        activations = largest_step(lambda step: profile_run(model, backend, step, longest, dtype, device), limits)
    with stages("allocate KV cache"):
        bytes_each = block_bytes(backend, model.attention_specs, size, dtype)
        pool = size_pool(config, bytes_each, *free_memory(device, activations), checkpoint.max_position_embeddings)
        with_graphs = device.type == "cuda" and backend.capturable and config.engine.cuda_graphs
        num_blocks = pool.num_blocks + with_graphs  # their scratch block is behind the scheduler's
        kv_caches = allocate(backend, model.attention_specs, num_blocks, size, dtype, device)
        limits = _limits(config, pool.max_model_len)
        vocab_size = model.vocab_size
        batch = InputBatch(limits.max_num_seqs, pool.max_model_len, size, vocab_size, device)
        speculator = create_speculator(limits, pool.max_model_len, config.scheduler.speculative_tokens)
        forward = select_forward(model, backend, kv_caches, limits)
        if with_graphs and isinstance(forward, ModuleForward):
            forward = GraphForward(forward, limits, pool.num_blocks, device, CudaCapture())
        # What is left to torch beside a native forward pass is small: waking its threads takes longer.
        torch.set_num_threads(threads if isinstance(forward, ModuleForward) else 1)
        runner = ModelRunner(forward, batch, InputBuffers(limits, device), speculator)
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
    )


def resolve_device(asked: str) -> torch.device:
    """The device that ``asked`` ('auto', 'cpu' or 'cuda') means on this machine.

    Raises:
        ConfigError: there is no such device.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is asked for, but torch sees no NVIDIA GPU; use auto or cpu.")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def available_threads(asked: int | None) -> int:
    """Threads for the worker: those ``asked`` for, else one a core; the other actors get their turns between phases."""
    return asked or available_cores()


def useful_threads(most: int, weights_bytes: int) -> int:
    """Threads that a step is worth: each needs weights to read, or it only makes the others wait for it."""
    return min(most, max(1, weights_bytes // _WEIGHTS_BYTES_A_THREAD))


def _limits(config: Config, max_model_len: int | None) -> StepLimits:
    scheduler, size = config.scheduler, config.cache.block_size
    longest = max_model_len or scheduler.max_num_batched_tokens
    return StepLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-longest // size), size)

"""Starts a model runner from a configuration, in stages."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from raylm.checkpoint import Checkpoint, resolve
from raylm.config import Config, EngineConfig, SchedulerConfig
from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.messages import WorkerInfo
from raylm.models import SINGLE_RANK, CausalLM, Encoder, Ranks, load_model, outline, resolve_dtype, with_kv_scales
from raylm.native import NativeError, most_likely, use_threads
from raylm.stages import about
from raylm.worker.attention import AnyBackend, StepLimits, select_backend
from raylm.worker.cgroup import available_cores, available_memory
from raylm.worker.distributed.rendezvous import Rendezvous
from raylm.worker.distributed.stages import Workers, join_workers
from raylm.worker.encoder import EncoderForward, EncoderPooler
from raylm.worker.features import AsyncDecode, Pipeline, Speculator
from raylm.worker.fingerprint import VARYING, fingerprint
from raylm.worker.forward import Forward, ModuleForward, select_forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import GIB, KVCacheSize, allocate, block_bytes, free_memory, size_pool
from raylm.worker.kv_memory import KVMemory
from raylm.worker.lora import create_adapters
from raylm.worker.memory import largest_step, profile_run
from raylm.worker.model_runner import ModelRunner
from raylm.worker.pooler import Pooler
from raylm.worker.sampling.grammars import Grammars
from raylm.worker.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

# Optional features by method or device. Without an entry the feature is refused, or skipped with a line in the log.
SPECULATORS = Family[Callable[[StepLimits, int, bool, Ranks], Speculator]]({
    "ngram": "raylm.worker.speculation.speculator:NGramSpeculator",
})  # fmt: skip
GRAPH_FORWARDS = Family[Callable[[ModuleForward, StepLimits, int, torch.device, Ranks], Forward]]({
    "cuda": "raylm.worker.gpu.cuda_graphs:GraphForward",
})  # fmt: skip
ASYNC_DECODES = Family[Callable[[StepLimits, torch.device], AsyncDecode]]({
    "cuda": "raylm.worker.gpu.async_decode:GPUAsyncDecode",
})  # fmt: skip

_WEIGHTS_BYTES_A_THREAD = 64 << 20  # one core reads this in about 5 ms
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}
_STEPS_AHEAD = 4  # longest steps for which the KV pool's memory is populated in advance


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The loaded model, its device and ranks, and its attention backend and sampler."""

    device: torch.device
    ranks: Ranks
    checkpoint: Checkpoint
    model: CausalLM
    dtype: torch.dtype
    weights_bytes: int
    threads: int
    block_size: int
    backend: type[AnyBackend]
    grammars: Grammars
    sampler: Sampler

    @property
    def layout(self) -> str:
        """The properties that determine the results besides the checkpoint, as text."""
        return f"{self.dtype}, {self.model.quantization}, attention by {self.backend.name}"

    @property
    def layers(self) -> tuple[int, int] | None:
        """The first and the last layer of this stage, None without stages."""
        config = getattr(self.model, "config", None)
        if self.ranks.stage.count == 1 or config is None:
            return None
        return config.layers.start, config.layers.stop - 1


@torch.inference_mode()
def start_runner(config: Config, rendezvous: Rendezvous | None = None) -> tuple[ModelRunner, WorkerInfo]:
    """Connect the ranks, load the weights, profile the memory, allocate the KV pool, and compile and capture kernels.

    Raises:
        ConfigError: the model cannot be served with this configuration.
    """
    stages: list[tuple[str, float]] = []  # (name, seconds)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        stages.append((name, time.perf_counter() - started))

    torch.set_num_threads(available_threads(config.engine))
    device = resolve_device(config.device)
    check_extras(config, device)
    workers = join_workers(rendezvous or Rendezvous(), config.engine, device)
    ranks, threads = workers.ranks, available_threads(config.engine, workers.beside)
    if device.type == "cpu":
        with stage("native kernels"):
            use_threads(threads)
    with stage("load weights"):
        loaded = _load(config, device, ranks, threads)
    with stage("profile run"):
        activations = _profile(config, loaded) if ranks.stage.count == 1 else 0
    with stage("allocate KV cache"):
        if ranks.stage.count > 1:
            workers.all_min([0])  # stages on this node may still be reading their weights
        bytes_each = block_bytes(loaded.backend, loaded.model.attention_specs, loaded.block_size, loaded.dtype)
        found = free_memory(device, activations, workers.beside, config.engine.max_replicas)
        free, default = ranks.all_reduce_min(found)
        longest = loaded.checkpoint.max_position_embeddings
        pool = size_pool(config, loaded.block_size, bytes_each, free, default, longest)
        pool = _smallest_pool(pool, workers)
        runner = _runner(config, loaded, pool, workers.pipeline)
        _check_stages(workers, runner.forward)
    if device.type == "cuda":
        with stage("compile kernels"):
            runner.compile_at_start(loaded.model.vocab_size)
    if runner.forward.captures:
        with stage("capture CUDA graphs"):
            runner.forward.capture_at_start()
    return runner, WorkerInfo(
        num_blocks=pool.num_blocks,
        block_size=loaded.block_size,
        max_model_len=pool.max_model_len,
        vocab_size=loaded.model.vocab_size,
        device=str(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention_backend=loaded.backend.name,
        threads=loaded.threads,
        weights_bytes=loaded.weights_bytes,
        kv_cache_bytes=pool.num_blocks * pool.block_bytes,
        stages=stages,
        quantization=loaded.model.quantization,
        tensor_parallel_size=ranks.world_size,
        layers=loaded.layers,
        fingerprint=_fingerprint(loaded, runner.forward, workers),
    )


def _smallest_pool(pool: KVCacheSize, workers: Workers) -> KVCacheSize:
    """All stages have as many blocks as the stage with the fewest."""
    if workers.ranks.stage.count == 1:
        return pool
    num_blocks, longest = workers.all_min([pool.num_blocks, pool.max_model_len])
    return replace(pool, num_blocks=num_blocks, max_model_len=longest)


def _check_stages(workers: Workers, forward: Forward) -> None:
    """Streams of the native decoder and of torch's modules differ."""
    if workers.ranks.stage.count > 1 and not workers.agree(type(forward).__name__):
        raise ConfigError(
            "engine.pipeline_parallel_size: the native decoder runs on some nodes only; the log of workers says why."
        )


def _fingerprint(loaded: _Loaded, forward: Forward, workers: Workers) -> str:
    """It guarantees nothing if the stages differ, as by the CPUs of their nodes."""
    own = fingerprint(loaded.checkpoint, loaded.layout, batch_invariant=forward.batch_invariant)
    same = workers.ranks.stage.count == 1 or workers.agree(own)
    return own if same else f"{own.removesuffix(VARYING)}{VARYING}"


def _load(config: Config, device: torch.device, ranks: Ranks, most_threads: int) -> _Loaded:
    checkpoint = resolve(config.model, config.revision)
    dtype = resolve_dtype(checkpoint, config.dtype, device)
    block_size, on_gpu = block_size_of(config, device), device.type == "cuda"
    fp8, attention = config.cache.dtype == "fp8", config.engine.attention_backend
    if fp8:  # check support before reading the weights
        specs = outline(checkpoint, dtype, device, config.quantization).attention_specs
        select_backend(with_kv_scales(specs, checkpoint), dtype, device, block_size, fp8=True, asked=attention)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_memory()
    try:
        model, weights_bytes = load_model(checkpoint, dtype, device, config.quantization, ranks)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model: the weights in {checkpoint} take {checkpoint.weight_bytes / GIB:.1f} GiB, but {device} had only "
            f"{free / GIB:.1f} GiB free. Use a smaller or a quantized model."
        ) from error
    threads = config.engine.threads or useful_threads(most_threads, weights_bytes)
    torch.set_num_threads(threads)
    if not on_gpu:
        use_threads(threads)
    backend = select_backend(model.attention_specs, dtype, device, block_size, fp8=fp8, asked=attention)
    if fp8:
        model.attention_specs = with_kv_scales(model.attention_specs, checkpoint)
    grammars = Grammars(checkpoint.path, checkpoint.eos_token_ids, model.vocab_size)  # reads the vocabulary on a thread
    sampler = Sampler(ranks=ranks, most_likely=most_likely if backend.name == "cpu" else None)
    found = device, ranks, checkpoint, model, dtype, weights_bytes, threads, block_size
    return _Loaded(*found, backend, grammars, sampler)


def _profile(config: Config, loaded: _Loaded) -> int:
    """Bytes that the largest step takes in addition to weights and KV cache."""
    if isinstance(loaded.model, Encoder):
        return 0  # a prompt of 512 tokens takes some 20 MB
    limits = _limits(config, loaded.block_size, loaded.checkpoint.max_position_embeddings)
    longest = loaded.checkpoint.max_position_embeddings or limits.max_num_tokens
    model, backend, where = loaded.model, loaded.backend, (loaded.dtype, loaded.device)
    alone = loaded.ranks.world_size == 1 and not config.scheduler.speculative_tokens
    decode = partial(create_async_decode, device=loaded.device, alone=alone)
    return largest_step(lambda at: profile_run(model, backend, at, longest, *where, loaded.sampler, decode), limits)


def _runner(config: Config, loaded: _Loaded, pool: KVCacheSize, pipeline: Pipeline) -> ModelRunner:
    model, backend, device, longest = loaded.model, loaded.backend, loaded.device, pool.max_model_len
    drafts, limits = config.scheduler.speculative_tokens, _limits(config, loaded.block_size, longest)
    sizes = limits.max_num_seqs, longest, limits.block_size, model.vocab_size
    batch = InputBatch(*sizes, loaded.grammars, draws=pipeline.is_last)
    capturable = device.type in GRAPH_FORWARDS and backend.capturable and model.capturable
    with_graphs = capturable and config.engine.cuda_graphs
    num_blocks = pool.num_blocks + with_graphs  # graphs need a scratch block after the scheduler's blocks
    kv_caches = allocate(backend, model.attention_specs, num_blocks, limits.block_size, loaded.dtype, device)
    encoder = model if isinstance(model, Encoder) else None
    forward = EncoderForward(encoder) if encoder else select_forward(model, backend, kv_caches, limits)
    if with_graphs and isinstance(forward, ModuleForward):
        forward = GRAPH_FORWARDS[device.type](forward, limits, pool.num_blocks, device, loaded.ranks)
    # With native products and attention, torch computes so little that waking its threads would take longer.
    is_native = backend.name == "cpu" and not model.torch_multiplies
    torch.set_num_threads(loaded.threads if isinstance(forward, ModuleForward) and not is_native else 1)
    blocks_ahead = _STEPS_AHEAD * limits.max_num_tokens // limits.block_size
    return ModelRunner(
        forward,
        batch,
        InputBuffers(limits, device),
        create_speculator(config.scheduler, limits, loaded.ranks),
        loaded.sampler,
        create_async_decode(limits, device, alone=loaded.ranks.world_size == 1 and not drafts),
        create_adapters(config.lora, model, forward, limits),
        KVMemory([half for kv in kv_caches for half in kv], blocks_ahead) if device.type == "cpu" else None,
        pipeline,
        EncoderPooler(encoder) if encoder else Pooler(),
    )


def create_speculator(config: SchedulerConfig, limits: StepLimits, ranks: Ranks = SINGLE_RANK) -> Speculator:
    if not config.speculative_tokens:
        return Speculator()
    try:
        return SPECULATORS["ngram"](limits, config.speculative_tokens, config.share_drafts, ranks)
    except NativeError as error:
        raise ConfigError(
            f"scheduler.speculative_tokens: drafts need native code, which is not available: {error}"
        ) from error


def create_async_decode(limits: StepLimits, device: torch.device, *, alone: bool) -> AsyncDecode:
    """Asynchronous decoding on a GPU for a worker that is ``alone``, else steps that wait for their tokens.

    A worker is not alone if other ranks take over its tokens, or if drafts are made from tokens known to the host.
    """
    return ASYNC_DECODES[device.type](limits, device) if alone and device.type in ASYNC_DECODES else AsyncDecode()


def block_size_of(config: Config, device: torch.device) -> int:
    return config.cache.block_size or _BLOCK_SIZES[device.type]


def check_extras(config: Config, device: torch.device) -> None:
    if config.scheduler.speculative_tokens and not SPECULATORS:
        raise ConfigError("scheduler.speculative_tokens: raylm.worker.speculation is not installed; only 0 is served.")
    if device.type == "cuda" and not GRAPH_FORWARDS:
        logger.warning(
            "Steps on a GPU are slower: raylm.worker.gpu, with its kernels and graphs, is not installed.",
            extra=about("slower"),
        )


def resolve_device(asked: str) -> torch.device:
    """Resolve 'auto', 'cpu' or 'cuda' to a device.

    Raises:
        ConfigError: a GPU is requested, or assigned to this process, but torch cannot use it. 'auto' then does not fall
            back to the CPU.
    """
    if asked == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # torch reports as a warning why it cannot use a GPU
        available = torch.cuda.is_available()
    if available:
        return torch.device("cuda")
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if asked == "auto" and given in ("", "-1", "NoDevFiles"):
        return torch.device("cpu")
    asks = "cuda is requested" if asked == "cuda" else f"this worker was given GPU {given} (CUDA_VISIBLE_DEVICES)"
    raise ConfigError(f"device: {asks}, but torch {torch.__version__} cannot use it: {_why_no_gpu(told)}")


def _why_no_gpu(told: Sequence[warnings.WarningMessage]) -> str:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA; install another, or set device: cpu."
    said = " ".join(" ".join(str(warning.message).split()) for warning in told)
    return said or f"it finds none; it is built for CUDA {torch.version.cuda}, and the driver must be as new."


def available_threads(engine: EngineConfig, beside: int | None = None) -> int:
    """Threads of a worker: ``engine.threads``, else its share of the cores of its node.

    ``beside`` workers of the engine are on the node, by default those of a stage. Other actors run between phases of a
    step.
    """
    return engine.threads or max(1, available_cores() // (beside or engine.tensor_parallel_size))


def useful_threads(most: int, weights_bytes: int) -> int:
    """Threads that speed up a step: each needs 64 MiB of weights to read, else waiting for it costs more."""
    return min(most, max(1, weights_bytes // _WEIGHTS_BYTES_A_THREAD))


def _limits(config: Config, size: int, max_model_len: int | None) -> StepLimits:
    scheduler = config.scheduler
    longest = max_model_len or scheduler.max_num_batched_tokens
    return StepLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-longest // size), size)

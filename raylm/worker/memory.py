"""Measures the memory of the largest step by running it once on dummy tokens, before the KV pool is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, takewhile

import torch

from raylm.errors import ConfigError
from raylm.messages import NewSequence, SchedulerOutput
from raylm.models import CausalLM
from raylm.params import SamplingParams
from raylm.worker.attention import AnyBackend, StepLimits
from raylm.worker.features import AsyncDecode
from raylm.worker.forward import select_forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import allocate
from raylm.worker.model_runner import ModelRunner
from raylm.worker.sampling.sampler import Sampler

_CPU_TOKENS = 256
_FEWEST_TOKENS = 16
_LITTLE_ASKED = SamplingParams()
# Every parameter that needs memory while a token is drawn, or allocates memory at the first request that uses it.
_ALL_ASKED = SamplingParams(
    top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=20
)


def largest_step(run: Callable[[StepLimits], int], limits: StepLimits) -> int:
    """The bytes that ``run`` measures for a step of these limits.

    Raises:
        ConfigError: the step does not fit in memory. The message names a smaller step that fits, found by trying.
    """
    try:
        return run(limits)
    except torch.OutOfMemoryError as error:
        cause = error.with_traceback(None)  # its frames would hold memory that smaller steps need
    halves = takewhile(lambda size: size >= _FEWEST_TOKENS, (limits.max_num_tokens >> i for i in count(1)))
    fitting = next((size for size in halves if _fits(run, limits, size)), None)
    raise ConfigError(
        f"scheduler.max_num_batched_tokens: a step of {limits.max_num_tokens} tokens does not fit in the memory "
        f"left by the weights; {f'{fitting} tokens fit' if fitting else 'no smaller step fits either'}."
    ) from cause


def _fits(run: Callable[[StepLimits], int], limits: StepLimits, tokens: int) -> bool:
    try:
        run(replace(limits, max_num_tokens=tokens, max_num_seqs=min(limits.max_num_seqs, tokens)))
    except torch.OutOfMemoryError:
        return False
    return True


def profile_run(
    model: CausalLM,
    backend: type[AnyBackend],
    limits: StepLimits,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    sampler: Sampler | None = None,
    async_decode: Callable[[StepLimits], AsyncDecode] | None = None,
) -> int:
    """Run a step with as many sequences and tokens as ``limits`` allow. Returns its bytes in addition to the weights.

    On a CPU the step is a warm-up of 256 tokens that measures nothing and returns 0: the full step of a large model
    would take half a minute, and the pool's default share leaves most of the memory free. On a GPU another step runs
    first, in which every sequence decodes with penalties, truncation and log-probabilities: the memory that it keeps on
    the device, and that it needs beside the logits, counts for the largest step too.
    """
    on_gpu = device.type == "cuda"
    tokens = limits.max_num_tokens if on_gpu else min(limits.max_num_tokens, _CPU_TOKENS)
    lengths = _lengths(tokens, limits.max_num_seqs, longest)
    size = limits.block_size
    blocks = -(-(max(lengths) + 1) // size)  # one more for the drawn token
    step = StepLimits(sum(lengths), len(lengths), blocks, size)
    batch = InputBatch(len(lengths), blocks * size, size, model.vocab_size)
    kv_caches = allocate(backend, model.attention_specs, blocks, size, dtype, device)
    forward = select_forward(model, backend, kv_caches, step)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    decode = async_decode(step) if async_decode is not None and on_gpu else None
    runner = ModelRunner(forward, batch, InputBuffers(step, device), sampler=sampler, async_decode=decode)
    if on_gpu:
        runner.execute(_plan([1] * len(lengths), blocks, _ALL_ASKED))
    runner.execute(_plan(lengths, blocks, finished=len(lengths) if on_gpu else 0))
    return torch.cuda.max_memory_allocated(device) - before if on_gpu else 0


def _lengths(tokens: int, seqs: int, longest: int) -> list[int]:
    """Lengths of the sequences: one token first, then as long as the budget allows. They need the most memory."""
    seqs, most = min(seqs, tokens), longest - 1
    return [1 + min(max(tokens - seqs - at * most, 0), most) for at in reversed(range(seqs))]


def _plan(
    lengths: list[int], blocks: int, params: SamplingParams = _LITTLE_ASKED, finished: int = 0
) -> SchedulerOutput:
    """A plan of new sequences with these lengths. All share the same blocks, because their results are not used."""
    seqs, table = len(lengths), list(range(blocks))
    new = [NewSequence(at, [0] * n, n, table, params, seed=0) for at, n in enumerate(lengths)]
    return SchedulerOutput(
        0, list(range(finished)), new, list(range(seqs)), [0] * seqs, lengths, [True] * seqs, [0] * seqs, []
    )

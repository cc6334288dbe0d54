"""The memory of the largest step, which is run once on made-up tokens before there is a KV pool."""

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
# All that takes memory while a token is drawn, and all that is kept for it from the first request on that asks.
_ALL_ASKED = SamplingParams(
    top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=20
)


def largest_step(run: Callable[[StepLimits], int], limits: StepLimits) -> int:
    """Bytes that ``run`` returns for a step of these limits; the error names a step that fits, found by trying."""
    try:
        return run(limits)
    except torch.OutOfMemoryError as error:
        cause = error.with_traceback(None)  # its frames would keep what smaller steps need
    halves = takewhile(lambda size: size >= _FEWEST_TOKENS, (limits.max_num_tokens >> i for i in count(1)))
    fitting = next((size for size in halves if _fits(run, limits, size)), None)
    raise ConfigError(
        f"scheduler.max_num_batched_tokens: a step of {limits.max_num_tokens} tokens does not fit into the memory "
        f"that the weights leave; {f'{fitting} tokens do' if fitting else 'nor does any smaller one'}."
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
    """Run a step of as many sequences and tokens as ``limits`` allow; return the bytes it took beside the weights.

    On a CPU the step is a warm-up of 256 tokens that measures nothing (0 is returned): a large model would take
    half a minute for the full one, and the pool's default share leaves most of the memory free. On a GPU a step comes
    before in which every sequence decodes and asks for penalties, truncation and log-probabilities: what it leaves on
    the device, and what it takes beside the logits, is the largest step's too.
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
    """One-token sequences first, then as long ones as there are tokens for: they make the most logits and scores."""
    seqs, most = min(seqs, tokens), longest - 1
    return [1 + min(max(tokens - seqs - at * most, 0), most) for at in reversed(range(seqs))]


def _plan(
    lengths: list[int], blocks: int, params: SamplingParams = _LITTLE_ASKED, finished: int = 0
) -> SchedulerOutput:
    """All sequences write to the same blocks: what they compute is of no interest."""
    seqs, table = len(lengths), list(range(blocks))
    new = [NewSequence(at, [0] * n, n, table, params, seed=0) for at, n in enumerate(lengths)]
    return SchedulerOutput(
        0, list(range(finished)), new, list(range(seqs)), [0] * seqs, lengths, [True] * seqs, [0] * seqs, []
    )

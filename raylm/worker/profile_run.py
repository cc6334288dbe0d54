"""Worker: the largest step, run once on made-up tokens before there is a KV pool, to see what it takes."""

from __future__ import annotations

import torch

from raylm.messages import NewSequence, SchedulerOutput
from raylm.models import CausalLM
from raylm.params import SamplingParams
from raylm.worker.attention import AnyBackend, StepLimits
from raylm.worker.forward import select_forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers
from raylm.worker.kv_cache import allocate
from raylm.worker.model_runner import ModelRunner
from raylm.worker.sampling.sampler import Sampler

_CPU_TOKENS = 256


def profile_run(
    model: CausalLM,
    backend: type[AnyBackend],
    limits: StepLimits,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    sampler: Sampler | None = None,
) -> int:
    """Run a step of as many sequences and tokens as ``limits`` allow; return the bytes it took beside the weights.

    On a CPU the step is a warm-up of 256 tokens that measures nothing (0 is returned): a large model would take
    half a minute for the full one, and the pool's default share leaves most of the memory free.
    """
    tokens = limits.max_num_tokens if device.type == "cuda" else min(limits.max_num_tokens, _CPU_TOKENS)
    lengths = _lengths(tokens, limits.max_num_seqs, longest)
    size = limits.block_size
    blocks = -(-(max(lengths) + 1) // size)  # room for the drawn token
    step = StepLimits(sum(lengths), len(lengths), blocks, size)
    batch = InputBatch(len(lengths), blocks * size, size, model.vocab_size, device)
    kv_caches = allocate(backend, model.attention_specs, blocks, size, dtype, device)
    runner = ModelRunner(
        select_forward(model, backend, kv_caches, step), batch, InputBuffers(step, device), sampler=sampler
    )
    if device.type != "cuda":
        runner.execute(_plan(lengths, blocks))
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(_plan(lengths, blocks))
    return torch.cuda.max_memory_allocated(device) - before


def _lengths(tokens: int, seqs: int, longest: int) -> list[int]:
    """One-token sequences first, then as long ones as there are tokens for: they make the most logits and scores."""
    seqs = min(seqs, tokens)
    rest = tokens - seqs
    lengths = []
    for _ in range(seqs):
        extra = min(rest, longest - 1)
        lengths.append(1 + extra)
        rest -= extra
    return lengths[::-1]


def _plan(lengths: list[int], blocks: int) -> SchedulerOutput:
    """All sequences write to the same blocks: what they compute is of no interest."""
    table = list(range(blocks))
    return SchedulerOutput(
        step=0,
        finished=[],
        new=[NewSequence(at, [0] * n, n, table, SamplingParams(), seed=0) for at, n in enumerate(lengths)],
        seq_ids=list(range(len(lengths))),
        num_computed=[0] * len(lengths),
        num_scheduled=lengths,
        samples=[True] * len(lengths),
        new_block_counts=[0] * len(lengths),
        new_block_ids=[],
    )

"""Tests that need a GPU: kernels, graphs, and greedy tokens equal to the CPU's. Skipped elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.greedy import greedy_rows
from raylm.config import Config
from raylm.messages import NewSequence
from raylm.models import AttentionSpec
from raylm.models.gpu.row_product import RowLinear
from raylm.params import SamplingParams
from raylm.worker.attention import AnyBackend
from raylm.worker.gpu.async_decode import GPUAsyncDecode
from raylm.worker.gpu.cuda_graphs import GraphForward
from raylm.worker.gpu.device_sampler import DeviceSampler, SamplingUploads, TritonSampler
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.triton_attention import Fp8TritonBackend, TritonBackend
from raylm.worker.gpu.xformers import XformersBackend
from raylm.worker.input_batch import InputBatch
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint
from tests.worker.driver import random_prompt
from tests.worker.gpu.test_async_decode import Life, blocks
from tests.worker.gpu.test_device_sampler import WISHES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default"),  # triton, xformers and torch warn about each other's versions
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", [TritonBackend, XformersBackend])
def test_the_kernel(backend: type[AnyBackend], dtype: torch.dtype, block_size: int, group: int, head_dim: int) -> None:
    spec = AttentionSpec(0, 2 * group, 2, head_dim, head_dim**-0.5)
    assert probe(backend, spec, dtype, torch.device("cuda"), block_size) is None


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < Fp8TritonBackend.capability,
    reason="Triton has no such fp8 for this GPU",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_our_kernel_over_fp8(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    spec = AttentionSpec(0, 8, 2, head_dim, head_dim**-0.5)
    assert probe(Fp8TritonBackend, spec, dtype, torch.device("cuda"), block_size) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 96), (6144, 4096), (4096, 14336)])
def test_the_product_of_one_row(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator, device="cuda").to(dtype) for n in (1, outputs))
    wanted = x.double() @ weight.double().t()
    got = RowLinear(weight, None)(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 0.01


@pytest.mark.parametrize("vocab_size", [3, 4097, 128256])
def test_the_sampler_draws_the_tokens_of_torchs_operations(vocab_size: int) -> None:
    """Both find the same peaks. Their float64 logarithms differ by at most the last bit."""
    params = [SamplingParams(**wish) for wish in WISHES] * 5
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    logits = 3.0 * torch.randn(len(params), vocab_size, generator=generator, device="cuda")
    batch = InputBatch(len(params), 64, 16, vocab_size)
    for at, wish in enumerate(params):
        batch.add(NewSequence(at, [1, 2, 3], 3, [0], wish, seed=at))
    uploads = SamplingUploads(len(params), logits.device)
    columns = uploads.upload(batch.sampling[: len(params)], batch.num_tokens[: len(params)], vocab_size)
    drawn = []
    for sampler in (DeviceSampler(), TritonSampler()):
        peaks = sampler.peaks(logits)
        assert torch.equal(peaks.values, logits.amax(dim=1))
        assert torch.equal(logits.gather(1, peaks.tokens[:, None])[:, 0], peaks.values)
        drawn.append(sampler.draw(logits, peaks, columns).tolist())
    assert drawn[0] == drawn[1]


def test_a_worker_has_graphs_and_decodes_asynchronously(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=False)
    tree = {"model": str(path), "device": "cuda", "cache": {"num_blocks": 64}, "scheduler": {"max_num_seqs": 8}}
    runner, info = start_runner(Config.model_validate(tree))
    assert info.attention_backend == "triton"
    assert isinstance(runner.forward, GraphForward)
    assert [size for size, *_ in runner.forward._graphs] == [8, 4, 2, 1]
    assert isinstance(runner.async_decode, GPUAsyncDecode)


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_are_the_cpus_or_a_tie(graphs: bool) -> None:
    """Answers to questions may differ only at ties. After meaningless beginnings, bfloat16 rounding may decide."""
    questions, beginnings = greedy_rows("cuda", engine={"cuda_graphs": graphs})
    assert questions["prompts"] == beginnings["prompts"] == 20
    assert all(margin < 1e-2 for margin in questions["margins"]), questions
    assert all(margin < 0.3 for margin in beginnings["margins"]), beginnings


def test_a_steady_step_waits_for_nothing_but_the_step_before(tmp_path: Path) -> None:
    """Measured with torch's profiler."""
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=False)
    tree = {"model": str(path), "device": "cuda", "cache": {"num_blocks": 64}, "scheduler": {"max_num_seqs": 4}}
    life = Life(start_runner(Config.model_validate(tree))[0], 2)
    for seq_id in range(3):
        life.add(seq_id, random_prompt(5, seq_id), blocks(seq_id))
    for _ in range(4):
        life.run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(8):
            life.run()
    waits = [event.name for event in profiler.events() or [] if "Synchronize" in event.name]
    assert waits.count("cudaEventSynchronize") <= 2 * 8, waits  # one for the tokens of a step, one for their buffer
    assert not set(waits) - {"cudaEventSynchronize", "cudaDeviceSynchronize"}, waits
    assert waits.count("cudaDeviceSynchronize") <= 2, waits  # from the profiler

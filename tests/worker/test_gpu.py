"""What only a GPU can show: its kernel, its graphs, and greedy tokens as the CPU has them; else left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raylm import LLM, SamplingParams
from raylm.config import Config
from raylm.llm import Completion
from raylm.models import AttentionSpec
from raylm.worker.attention.probe import probe
from raylm.worker.attention.xformers import XformersBackend
from raylm.worker.device_feed import DeviceFeed
from raylm.worker.graph_forward import GraphForward
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
PROMPTS = [f"{a} plus {b} is" for a, b in zip(range(3, 23), range(40, 60), strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel(dtype: torch.dtype, block_size: int, group: int, head_dim: int) -> None:
    spec = AttentionSpec(0, 2 * group, 2, head_dim, head_dim**-0.5)
    assert probe(XformersBackend, spec, dtype, torch.device("cuda"), block_size) is None


def test_a_worker_has_graphs_and_feeds_itself(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=False)
    tree = {"model": str(path), "device": "cuda", "cache": {"num_blocks": 64}, "scheduler": {"max_num_seqs": 8}}
    runner, info = start_runner(Config.model_validate(tree))
    assert info.attention_backend == "xformers"
    assert isinstance(runner.forward, GraphForward)
    assert [size for size, _ in runner.forward.captured] == [8, 4, 2, 1]
    assert isinstance(runner.feed, DeviceFeed)


def answers(logprobs: int | None, **config: Any) -> list[Completion]:
    """What the embedded model says to each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=logprobs)
    with LLM("embedded", **config) as llm:
        return [result.completions[0] for result in llm.generate(PROMPTS, params, progress=False)]


def margins(completion: Completion) -> list[float]:
    """How far the best logit was before the second, at each token."""
    tops = [sorted(logprob for _, logprob in told.top) for told in completion.logprobs or []]
    return [top[-1] - top[-2] for top in tops]


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_are_the_cpus_or_a_tie(graphs: bool) -> None:
    """Where they part, the CPU's two best tokens are within 0.01 of each other."""
    here = answers(2, device="cpu", dtype="bfloat16")
    there = answers(None, device="cuda", dtype="bfloat16", engine={"cuda_graphs": graphs})
    for wanted, got in zip(here, there, strict=True):
        pairs = zip(wanted.token_ids, got.token_ids, margins(wanted), strict=False)
        parted = next((margin for a, b, margin in pairs if a != b), 0.0)
        assert parted < 1e-2, (wanted.token_ids, got.token_ids)

"""Two machines serve a checkpoint that does not fit in the memory of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raylm import LLM, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.nodes.cluster import Cluster
from tests.nodes.machines import Network, lacking, lacking_memory_limits, until

MISSING = lacking() or lacking_memory_limits()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(MISSING is not None, reason=f"machines with little memory: {MISSING}"),
]
GIB = 1 << 30
LIMIT = 5 * GIB // 2
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
LAYERS = 21  # of 120 MiB each
PROMPT = "The scheduler batches sequences"
TOKENS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head without engines, and two machines with one core and little memory each."""
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder, {2: LIMIT, 3: LIMIT}) as network:
        yield Cluster(network, folder, head_cpus=0)


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    """Write a checkpoint to the same path on all machines. Returns its path for this process."""
    first, *others = [machine.home / "model" for machine in cluster.network.machines]
    make_checkpoint(first, "qwen3", dtype=torch.bfloat16, head_dim=128, num_hidden_layers=LAYERS, **SIZES)
    for other in others:
        shutil.copytree(first, other, copy_function=os.link)
    return first


def serve(cluster: Cluster, stages: int) -> None:
    engine = {"threads": 1, "pipeline_parallel_size": stages}
    cluster.submit(
        {"model": "/tmp/home/model", "served_model_name": "m", "cache": {"memory_gib": 0.1}, "engine": engine}
    )


def test_two_machines_serve_a_checkpoint_that_does_not_fit_in_one(
    cluster: Cluster, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> str:
        return cluster.head.run("serve", "status", "-a", f"http://{cluster.head.address}:8265")

    def says(word: str) -> bool:
        return word in status()

    def answer() -> dict[str, Any]:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        url = f"http://{cluster.served[-1].address}:8000/v1/completions"
        options = ("-sf", "-m", "300", "-H", "content-type: application/json", "-d", json.dumps(body))
        found: dict[str, Any] = json.loads(cluster.network.operator("curl", *options, url, timeout_s=320))
        return found

    serve(cluster, 1)
    until(lambda: says("GiB are free on its node"), "a machine alone takes it")
    assert "engine: it needs 2." in status()
    serve(cluster, 2)
    until(lambda: len(cluster.nodes_of("Worker")) == 2 and answer(), "two machines do not serve it", 400)
    assert cluster.nodes_of("Worker") == [machine.address for machine in cluster.served]
    text = answer()["choices"][0]["text"]
    with capsys.disabled():
        used = ", ".join(f"{machine.most_memory() / GIB:.2f}" for machine in cluster.served)
        print(f"\nat most {used} of {LIMIT / GIB:.2f} GiB used")
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(model), engine={"threads": 1}, cache={"memory_gib": 0.1}) as one:
        assert text == one.generate(PROMPT, params, progress=False)[0].text

"""Models with experts on a simulated GPU: no step waits for the number of an expert's rows, and graphs are captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm.models.experts import GROUPED_EXPERTS
from raylm.models.gpu.experts import TritonExperts
from raylm.worker.forward import ModuleForward
from raylm.worker.gpu.cuda_graphs import GraphForward
from tests.worker.driver import random_prompt
from tests.worker.gpu.simulated_gpu import Gpu, gpu  # noqa: F401 (a fixture)
from tests.worker.gpu.test_async_decode import Life, blocks
from tests.worker.gpu.test_simulated_gpu import machine, start  # noqa: F401 (fixtures)
from tests.worker.gpu.test_simulated_gpu_features import drawn

OTHERS = [
    "AfmoeForCausalLM", "Cohere2MoeForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM", "Glm4MoeForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM",
    "HunYuanMoEV1ForCausalLM", "HYV3ForCausalLM", "LagunaForCausalLM", "MellumForCausalLM", "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "SolarOpenForCausalLM",
]  # fmt: skip
_FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
WITHOUT_WINDOWS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": _FULL, "Cohere2MoeForCausalLM": _FULL, "ExaoneMoeForCausalLM": _FULL,
    "MixtralForCausalLM": {"sliding_window": None},
}  # fmt: skip
FAMILIES = ["Qwen3MoeForCausalLM", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


def product(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """The result of product_by_expert. interpreted_experts.py compares the real kernel with torch."""
    experts = torch.searchsorted(ends.long(), torch.arange(len(order)), right=True)
    out = x.new_empty(len(order), weight.shape[1])
    out[order] = torch.einsum("poi,pi->po", weight[experts], x[order // (len(order) // len(x))])
    return out


def add(products: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    return (products.view(*weights.shape, -1) * weights[..., None]).sum(1).to(dtype)


@pytest.fixture
def grouped(machine: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:  # noqa: F811
    """The simulated GPU with the kernels of experts."""
    monkeypatch.setattr(TritonExperts, "_product", lambda self, *args: machine.kernel(product)(*args))
    monkeypatch.setattr(TritonExperts, "_add", lambda self, *args: machine.kernel(add)(*args))
    return machine


def make(path: Path, architecture: str) -> Path:
    """A checkpoint without windows, because no GPU kernel supports windows in float32."""
    from tests.models.transformers_backend.families import make_family

    return make_family(path, architecture, **WITHOUT_WINDOWS.get(architecture, {}))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_are_the_cpus_and_steps_are_captured_and_wait_for_nothing(
    grouped: Gpu, tmp_path: Path, architecture: str
) -> None:
    path = make(tmp_path, architecture)
    assert drawn(start(path), {}) == drawn(start(path, device="cpu"), {})
    assert grouped.replays
    life = Life(start(path, engine={"cuda_graphs": False}), 2)
    for seq_id in range(3):
        life.add(seq_id, random_prompt(5, seq_id), blocks(seq_id))
    for _ in range(3):
        life.run()
    grouped.waits.clear()
    for _ in range(4):
        life.run()
    assert grouped.waits == []


@pytest.mark.long
def test_experts_one_by_one_would_wait(
    grouped: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As without triton: the log has a warning, and nothing is captured."""
    monkeypatch.setitem(GROUPED_EXPERTS._homes, "cuda", "raylm.models.gpu.absent:TritonExperts")
    path = make(tmp_path, "Qwen3MoeForCausalLM")
    runner = start(path)
    assert isinstance(runner.forward, ModuleForward)
    assert "one by one, and much slower: No module named 'raylm.models.gpu.absent'" in caplog.text
    assert drawn(runner, {}) == drawn(start(path, device="cpu"), {})
    assert any("bincount" in wait for wait in grouped.waits)


@pytest.mark.long
def test_routing_by_modeling_code_of_its_own_is_not_captured(grouped: Gpu, tmp_path: Path) -> None:
    """JetMoe's experts are not of the common module class. They ask the host for the number of rows."""
    path = make(tmp_path, "JetMoeForCausalLM")
    runner = start(path)
    assert not isinstance(runner.forward, GraphForward)
    assert drawn(runner, {}) == drawn(start(path, device="cpu"), {})

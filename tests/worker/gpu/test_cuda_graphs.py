"""Steps that are padded to a batch bucket and replayed from static buffers equal eager steps. Nothing is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.models import AttentionSpec
from raylm.worker.attention import AttentionBackend, AttentionMetadata, StepLimits
from raylm.worker.forward import ModuleForward
from raylm.worker.gpu.cuda_graphs import GraphForward
from tests.checkpoints import make_checkpoint
from tests.worker.driver import Driver, Reference, kv_caches, random_prompt

CPU = torch.device("cpu")
NUM_BLOCKS = 64


class DeviceBackend(AttentionBackend[AttentionMetadata]):
    """Attention without data from the host: each token attends to its sequence's whole table, with a mask."""

    name, capturable = "device", True

    def __init__(self, limits: StepLimits) -> None:
        self.size = limits.block_size

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        return []

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        return (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: AttentionMetadata, layer: AttentionSpec
    ) -> Tensor:
        keys, values = kv.flatten(1, 2).unbind(0)
        keys[plan.slot_mapping], values[plan.slot_mapping] = k, v
        counts = plan.query_start_loc.diff().long()
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
        ends = (plan.seq_lens - plan.query_start_loc[1:])[owners] + torch.arange(1, len(q) + 1)
        slots = (plan.block_tables[:, :, None] * self.size + torch.arange(self.size)).flatten(1)[owners].long()
        seen = torch.arange(slots.shape[1]) < ends[:, None]
        slots = torch.where(seen, slots, slots[:, :1])
        heads = layer.num_heads // layer.num_kv_heads
        gathered = [pool[slots].repeat_interleave(heads, 2).transpose(1, 2) for pool in (keys, values)]
        out = F.scaled_dot_product_attention(q[:, :, None], *gathered, attn_mask=seen[:, None, None], scale=layer.scale)
        return out[:, :, 0]


@dataclass
class Recorder:
    """Replaces a CUDA graph: it repeats the call on the same memory, and copies the result to the same place."""

    captures: int = 0
    replays: int = 0
    full: bool = False

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.captures += 1
        place = run().clone()

        def replay() -> Tensor:
            self.replays += 1
            return place.copy_(run())

        return replay


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def graph_driver(path: Path, recorder: Recorder | None, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose runner uses DeviceBackend, with a GraphForward if there is a recorder."""

    def select(
        model: object, backend: object, caches: list[Tensor], limits: StepLimits
    ) -> ModuleForward | GraphForward:
        shape = DeviceBackend.kv_cache_shape(NUM_BLOCKS + 1, limits.block_size, model.attention_specs[0])  # type: ignore[attr-defined]
        pools = [torch.zeros(shape) for _ in caches]
        eager = ModuleForward(model, DeviceBackend(limits), pools)  # type: ignore[arg-type]
        if recorder is None:
            return eager
        graphs = GraphForward(eager, limits, NUM_BLOCKS, CPU, capture=recorder)
        graphs._kv_caches = [pool[:, :NUM_BLOCKS] for pool in pools]  # type: ignore[attr-defined]
        return graphs

    monkeypatch.setattr("raylm.worker.startup.select_forward", select)
    monkeypatch.setattr("raylm.worker.gpu.batch_buckets._NARROWEST", 32)
    return Driver(path, num_blocks=NUM_BLOCKS)


def serve(driver: Driver) -> None:
    """Run five sequences. They join one after the other, and one leaves, so that batches of 1 to 5 occur."""
    for seq_id, length in enumerate([5, 20, 31, 3, 40]):
        driver.add(seq_id, random_prompt(length, seq_id))
        driver.step(dict.fromkeys(range(seq_id), 1) | {seq_id: length})
        driver.step(dict.fromkeys(range(seq_id + 1), 1))
    for _ in range(3):
        driver.step(dict.fromkeys([0, 2, 3, 4], 1))


def test_padded_and_replayed_steps_equal_the_steps_as_they_are(
    path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    graphs, eager = graph_driver(path, recorder, monkeypatch), graph_driver(path, None, monkeypatch)
    serve(graphs)
    serve(eager)
    assert recorder.replays == 8
    for seq_id, seq in graphs.sequences.items():
        assert seq.tokens == eager.sequences[seq_id].tokens
        assert reference.error(seq) < 1e-4


def test_a_step_leaves_nothing_behind_for_the_next_ones_padding(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of three sequences follows one of four. The padding row must not write to the fourth sequence's blocks."""
    driver = graph_driver(path, Recorder(), monkeypatch)
    for seq_id in range(4):
        driver.add(seq_id, random_prompt(9, seq_id))
        driver.step({seq_id: 9})
    driver.step(dict.fromkeys(range(4), 1))
    block = driver.sequences[3].blocks[0]
    with torch.inference_mode():
        for pool in kv_caches(driver.runner):
            pool[:, block] = 7.0
    driver.step(dict.fromkeys(range(3), 1))
    assert all(bool((pool[:, block] == 7.0).all()) for pool in kv_caches(driver.runner))


def test_padding_that_were_not_reset_would_be_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: padding rows keep the data of the previous step."""
    monkeypatch.setattr("raylm.worker.gpu.cuda_graphs.DecodeBuffers._pad", lambda self, start, end: None)
    with pytest.raises(AssertionError):
        test_a_step_leaves_nothing_behind_for_the_next_ones_padding(path, monkeypatch)


def test_all_graphs_are_captured_at_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are (sequences, blocks of their tables): for 32 tokens, 128 tokens, and the longest sequence."""
    recorder = Recorder()
    driver = graph_driver(path, recorder, monkeypatch)
    forward = driver.runner.forward
    assert isinstance(forward, GraphForward)
    assert list(forward._graphs) == [(size, width, False) for width in (2, 8, 16) for size in (64, 32, 16, 8, 4, 2, 1)]
    assert recorder.replays == 0
    assert "capture CUDA graphs" in dict(driver.info.stages)
    driver.add(0, random_prompt(4, 0))
    driver.run(0, until=40)
    assert recorder.replays > 30
    assert recorder.captures == 21


def test_without_memory_for_a_graph_the_step_runs_as_it_is_and_the_log_says_so(
    path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = graph_driver(path, Recorder(full=True), monkeypatch)
    prompt = random_prompt(6, 1)
    driver.add(0, prompt)
    with caplog.at_level(logging.WARNING):
        assert driver.run(0, until=16).tokens == reference.greedy(prompt, 10)
    assert caplog.text.count("their CUDA graph has no memory") == 21  # one line for each graph, and no more

"""A KV cache in fp8 on a simulated GPU: the tokens are transformers' with keys and values rounded to fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3

from raylm.checkpoint import Checkpoint
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.models import AttentionSpec
from raylm.worker import startup
from raylm.worker.attention import select_backend
from raylm.worker.forecast import forecast_pool
from raylm.worker.gpu import triton_attention
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import Pages
from raylm.worker.gpu.triton_attention import Fp8TritonBackend, PagedAttention
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint
from tests.fp8 import FP8, nearest
from tests.worker.driver import Reference, kv_caches
from tests.worker.gpu.simulated_gpu import CPU, CUDA, Gpu, gpu  # noqa: F401 (a fixture)
from tests.worker.gpu.test_async_decode import Life, blocks, eventful
from tests.worker.gpu.test_simulated_gpu import Device, attend, equip, start
from tests.worker.gpu.test_simulated_gpu_features import ADAPTED, adapters, drawn, low_rank_on, with_adapters
from tests.worker.test_worker_with_scheduler import NEW_TOKENS, PROMPTS, SHARING, serve

POOL: dict[str, Any] = {"num_blocks": 64, "block_size": 16}
# The first scale cuts off keys beyond 1.3.
SCALES = {"model.layers.0.self_attn.k_scale": 0.003, "model.layers.1.self_attn.v_scale": 0.3}


def attends_on(device: Device) -> Callable[..., Tensor]:
    """The fp8 attention kernel's result, as one launch. interpreted_paged.py compares the real kernel with torch."""

    def launch(
        self: PagedAttention, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec
    ) -> Tensor:
        def run(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
            floats = keys.to(q.dtype) * spec.key_scale, values.to(q.dtype) * spec.value_scale
            return attend(self, q, *floats, Pages(tables, lengths, pages.queries), spec)  # type: ignore[arg-type]

        return device.kernel(run)(q, keys, values, pages.block_tables, pages.lengths)  # type: ignore[no-any-return]

    return launch


@pytest.fixture
def machine(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:  # noqa: F811
    """The simulated GPU with Triton's kernels, which also accept float32."""
    equip(monkeypatch, gpu)
    monkeypatch.setattr(triton_attention, "refusals", lambda dtype, device, capability: [])
    monkeypatch.setattr(PagedAttention, "__call__", attends_on(gpu))
    yield gpu
    probe.cache_clear()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_scales(make_checkpoint(tmp_path_factory.mktemp("scaled"), "qwen3", tokenizer=False), SCALES)


def with_scales(path: Path, scales: dict[str, float]) -> Path:
    weights = load_file(path / "model.safetensors") | {name: torch.tensor([scale]) for name, scale in scales.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def rounded(patch: pytest.MonkeyPatch, modeling: Any, scales: dict[str, float]) -> None:
    """Let transformers attend to keys and values rounded to the nearest fp8 value."""
    attention = modeling.eager_attention_forward

    def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        held = []
        for name, rows in (("k", k), ("v", v)):
            scale = scales.get(f"model.layers.{module.layer_idx}.self_attn.{name}_scale", 1.0)
            held.append((nearest(rows * torch.tensor(1 / scale)) * scale).to(rows.dtype))
        return attention(module, q, *held, *args, **options)

    patch.setattr(modeling, "eager_attention_forward", eager)


def answers(path: Path, prompts: list[list[int]], modeling: Any, scales: dict[str, float] | None) -> list[list[int]]:
    """transformers' answers. With ``scales``, keys and values are rounded to fp8."""
    reference = Reference(path)
    with pytest.MonkeyPatch.context() as patch:
        if scales is not None:
            rounded(patch, modeling, scales)
        return [reference.greedy(prompt, NEW_TOKENS)[len(prompt) :] for prompt in prompts]


@pytest.fixture(scope="module")
def wanted(path: Path) -> dict[tuple[int, ...], list[int]]:
    prompts = [*PROMPTS, *SHARING]
    found = answers(path, prompts, modeling_qwen3, {})
    assert found != answers(path, prompts, modeling_qwen3, None), "rounding must change some of these tokens"
    return {tuple(prompt): answer for prompt, answer in zip(prompts, found, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("prompts", "cache", "scheduler"),
    [
        (PROMPTS, {"num_blocks": 96}, {}),
        (PROMPTS, {"num_blocks": 12, "block_size": 16}, {"max_num_batched_tokens": 16, "max_num_seqs": 5}),
        (SHARING, {"num_blocks": 96, "block_size": 16}, {"max_num_seqs": 2}),
    ],
    ids=["8-at-once", "preempted-in-chunks", "warm-prefix-cache"],
)
def test_greedy_tokens_equal_transformers_with_rounded_keys_and_values(
    machine: Gpu,
    path: Path,
    wanted: dict[tuple[int, ...], list[int]],
    prompts: list[list[int]],
    cache: dict[str, Any],
    scheduler: dict[str, Any],
) -> None:
    found, core = serve(path, prompts, cache | {"dtype": "fp8"}, scheduler)
    assert [found[key] for key in range(len(prompts))] == [wanted[tuple(prompt)] for prompt in prompts]
    assert machine.replays > NEW_TOKENS // 2
    assert (core.counters.prefix_hits > 0) == (prompts is SHARING)


def test_one_sequence_over_the_scales_of_the_checkpoint(machine: Gpu, path: Path, scaled: Path) -> None:
    life = Life(start(scaled, cache=POOL | {"dtype": "fp8"}, engine={"cuda_graphs": False}), 1)
    life.add(0, PROMPTS[0], blocks(0))
    for _ in range(8):
        life.run()
    reference, count = Reference(path), len(PROMPTS[0])
    plain = reference.greedy(PROMPTS[0], 8)[count:]
    with pytest.MonkeyPatch.context() as patch:
        rounded(patch, modeling_qwen3, SCALES)
        assert life.end()[0] == reference.greedy(PROMPTS[0], 8)[count:] != plain


@pytest.mark.long
def test_scales_of_the_checkpoint(machine: Gpu, path: Path, scaled: Path) -> None:
    """They change the tokens. A model whose KV cache is not in fp8 ignores them."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    found, _ = serve(scaled, PROMPTS[:2], POOL | {"dtype": "fp8"}, sizes)
    assert [found[0], found[1]] == answers(path, PROMPTS[:2], modeling_qwen3, SCALES)
    assert [found[0], found[1]] != answers(path, PROMPTS[:2], modeling_qwen3, {})
    found, _ = serve(scaled, PROMPTS[:2], POOL, sizes)
    assert [found[0], found[1]] == answers(path, PROMPTS[:2], modeling_qwen3, None)


@pytest.mark.long
@pytest.mark.parametrize("is_fast", [False, True], ids=["slow", "fast"])
def test_sequences_come_and_go_with_graphs_as_without(machine: Gpu, scaled: Path, is_fast: bool) -> None:
    machine.is_fast = is_fast
    cache = POOL | {"dtype": "fp8"}
    replayed = eventful(Life(start(scaled, cache=cache), 2))
    assert machine.replays > 15
    before = machine.replays
    assert replayed == eventful(Life(start(scaled, cache=cache, engine={"cuda_graphs": False}), 1))
    assert machine.replays == before


@pytest.mark.long
def test_transformers_modeling(machine: Gpu, tmp_path: Path) -> None:
    """With transformers' modeling code, the attention backend writes keys and values."""
    from tests.models.transformers_backend.families import make_family

    make_family(tmp_path, "Olmo2ForCausalLM")
    found, _ = serve(tmp_path, PROMPTS, {"num_blocks": 96, "dtype": "fp8"}, {})
    assert [found[key] for key in range(len(PROMPTS))] == answers(tmp_path, PROMPTS, modeling_olmo2, {})
    assert machine.replays


@pytest.mark.long
def test_adapters_are_of_the_models_type(
    machine: Gpu, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_rank_on(machine, monkeypatch)
    runner = with_adapters(path, adapters(path, tmp_path), "cuda", cache=POOL | {"dtype": "fp8"})
    assert drawn(runner, ADAPTED) != drawn(runner, {})


def config(path: Path, **cache: Any) -> Config:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    tree = {"model": str(path), "dtype": "bfloat16", "cache": {"block_size": 16} | cache, "scheduler": sizes}
    return Config.model_validate(tree | {"engine": {"cuda_graphs": False}})


def test_twice_as_many_tokens_in_the_same_memory(machine: Gpu, path: Path) -> None:
    """A worker and `raylm doctor` agree. The fingerprint differs."""
    runner, narrow = start_runner(config(path, memory_gib=2**-10, dtype="fp8"))
    _, wide = start_runner(config(path, memory_gib=2**-10))
    assert narrow.num_blocks == 2 * wide.num_blocks
    assert narrow.kv_cache_bytes == wide.kv_cache_bytes
    assert {pool.dtype for pool in kv_caches(runner)} == {FP8}
    assert sum(pool.numel() for pool in kv_caches(runner)) == narrow.kv_cache_bytes == 2**20
    assert (narrow.attention_backend, narrow.dtype) == ("triton-fp8", "bfloat16")
    assert narrow.fingerprint != wide.fingerprint
    told = forecast_pool(config(path, memory_gib=2**-10, dtype="fp8"), Checkpoint(path), "cuda")
    assert (told.pool.num_blocks, told.attention_backend) == (narrow.num_blocks, "triton-fp8")


def unread(*args: object) -> None:
    raise AssertionError("weights are read")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cpu"}, r"triton-fp8: it computes on NVIDIA GPUs only\)"),
        ({"dtype": "float32"}, r"triton-fp8: it has no torch\.float32\)"),
        ({}, r"triton-fp8: it needs a GPU of compute capability 8\.9, and this one has \(8, 6\)\)"),
    ],
)
def test_what_cannot_do_it_is_refused_before_weights_are_read(
    gpu: Gpu,  # noqa: F811
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(startup, "load_model", unread)
    if not changes:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    tree = config(path, dtype="fp8").model_dump() | changes
    with pytest.raises(ConfigError, match=r"^cache\.dtype: no attention backend serves .* in fp8 here \(" + said):
        start_runner(Config.model_validate(tree))


def test_without_its_package_it_is_refused(gpu: Gpu, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("raylm.worker.attention.FP8_BACKENDS", {})
    with pytest.raises(ConfigError, match=r"^cache\.dtype: .* \(there is none\)"):
        select_backend([], torch.bfloat16, CUDA, 64, fp8=True)


@pytest.mark.parametrize(
    "scale", [torch.tensor([0.1, 0.2]), torch.tensor([-1.0]), torch.tensor(float("nan"))], ids=["by-head", "-1", "nan"]
)
def test_scales_that_are_no_positive_numbers_are_refused(
    machine: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Tensor
) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    with_scales(tmp_path, SCALES)
    weights = load_file(tmp_path / "model.safetensors") | {"model.layers.1.self_attn.k_scale": scale}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(startup, "load_model", unread)
    with pytest.raises(
        ConfigError, match=r"model: model\.layers\.1\.self_attn\.k_scale of .* is \[.*cache\.dtype: auto"
    ):
        start_runner(config(tmp_path, dtype="fp8"))


def test_the_backend_serves_what_our_kernel_serves(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(triton_attention, "probe", lambda *args: None)

    def said(device: torch.device = CUDA, **changes: Any) -> str:
        shape = {"layer": 3, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 0.1}
        return "; ".join(Fp8TritonBackend.supports(AttentionSpec(**shape | changes), torch.bfloat16, device, 64))

    assert said() == said(sliding_window=9, softcap=3.0, head_dim=80) == ""
    assert said(head_dim=512) == "it has no head_dim 512, only 16 to 256"
    assert said(CPU) == "it computes on NVIDIA GPUs only"

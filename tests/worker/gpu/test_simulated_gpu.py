"""The worker's CUDA path on a simulated GPU: graphs, asynchronous decoding and padding give transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.config import Config
from raylm.models import AttentionSpec, load_model
from raylm.models.elementwise import ELEMENTWISE, TORCH, Angles, Elementwise, HeadWeights, KVPlaces
from raylm.models.linear import DENSE_LINEARS
from raylm.params import SamplingParams
from raylm.worker import startup
from raylm.worker.forward import ModuleForward
from raylm.worker.gpu import async_decode, device_sampler, triton_attention
from raylm.worker.gpu.device_logprobs import DeviceLogprobs
from raylm.worker.gpu.device_penalties import DevicePenalties
from raylm.worker.gpu.device_sampler import DeviceSampler, Peaks, SamplingColumns
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import Pages
from raylm.worker.gpu.triton_attention import PagedAttention
from raylm.worker.input_buffers import StepInputs
from raylm.worker.model_runner import ModelRunner
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint
from tests.worker.driver import Reference, random_prompt
from tests.worker.gpu.simulated_gpu import Event, Gpu, gpu  # noqa: F401 (a fixture)
from tests.worker.gpu.test_async_decode import Life, blocks, eventful
from tests.worker.test_worker_with_scheduler import NEW_TOKENS, PROMPTS, SHARING, serve


def attend(self: PagedAttention, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """The attention kernel's result by torch's operations. Data after the end of a sequence is ignored."""
    count, size, device = len(pages.lengths), self._block_size, q.device
    tables = F.pad(pages.block_tables, (0, 0, 0, count - len(pages.block_tables))).long()
    slots = (tables[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    ends = pages.lengths[:, None] - torch.arange(pages.queries - 1, -1, -1, device=device)
    places = torch.arange(slots.shape[1], device=device)
    there = places < pages.lengths[:, None]
    k, v = (torch.where(there[:, :, None, None], pool[torch.where(there, slots, 0)], 0.0) for pool in (keys, values))
    heads = (count, pages.queries, spec.num_kv_heads, -1, spec.head_dim)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.view(heads), k) * spec.scale
    seen = (places < ends[:, :, None])[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, -1e30), -1) * seen
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape)


class Device(Protocol):
    """A device that launches kernels: a simulated GPU, or one for each calling thread."""

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]: ...


def attends_on(device: Device) -> Callable[..., Tensor]:
    """``attend`` as one kernel of the device."""

    def launch(
        self: PagedAttention, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec
    ) -> Tensor:
        def run(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
            return attend(self, q, keys, values, Pages(tables, lengths, pages.queries), spec)

        return device.kernel(run)(q, keys, values, pages.block_tables, pages.lengths)  # type: ignore[no-any-return]

    return launch


class SimulatedKernels(Elementwise):
    """Each method is one launch, as on a GPU. interpreted_kernels.py compares the real kernels with torch."""

    device: ClassVar[Device]

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, self.device.kernel(_add_rms_norm)(x, delta, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self.device.kernel(TORCH.silu_and_mul)(gate_up)  # type: ignore[no-any-return]

    def rotate_and_write(self, qkv: Tensor, angles: Angles, norm: HeadWeights | None, places: KVPlaces) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        pools = places.keys, places.values, places.slots, places.key_scale, places.value_scale
        return self.device.kernel(_rotate_and_write)(qkv, angles, weight, eps, *pools)  # type: ignore[no-any-return]


class SimulatedLinear:
    """A linear layer with one launch, for any number of rows."""

    device: ClassVar[Device]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.device.kernel(F.linear)(x, self._weight, self._bias)  # type: ignore[no-any-return]


class SimulatedSampler(DeviceSampler):
    """The kernels of a draw, with one launch for both passes of each."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def peaks(self, logits: Tensor) -> Peaks:
        return Peaks(*self._device.kernel(lambda logits: tuple(logits.max(dim=1)))(logits))

    def _race(self, logits: Tensor, peaks: Peaks, columns: SamplingColumns, kept: Tensor | None) -> Tensor:
        names = "temperature", "top_p", "min_p", "top_k", "states"

        def run(logits: Tensor, values: Tensor, tokens: Tensor, kept: Tensor | None, *each: Tensor) -> Tensor:
            by_row = replace(columns, **dict(zip(names, each, strict=True)))
            return DeviceSampler()._race(logits, Peaks(values, tokens), by_row, kept)

        given = logits, peaks.values, peaks.tokens, kept, *(getattr(columns, name) for name in names)
        return self._device.kernel(run)(*given)  # type: ignore[no-any-return]


def _add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        x.add_(delta)
    return TORCH.add_rms_norm(x, None, weight, eps)[1]


def _rotate_and_write(qkv: Tensor, angles: Angles, weight: Tensor | None, eps: float, *pools: Any) -> Tensor:
    norm = None if weight is None else HeadWeights(weight, eps)
    return TORCH.rotate_and_write(qkv, angles, norm, KVPlaces(*pools)).contiguous()


@pytest.fixture
def machine(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:  # noqa: F811
    """The simulated GPU with RayLM's kernels, which also accept float32."""
    equip(monkeypatch, gpu)
    yield gpu
    probe.cache_clear()


def equip(patch: pytest.MonkeyPatch, device: Device) -> None:
    patch.setattr(triton_attention, "refusals", lambda dtype, device, capability: [])
    patch.setattr(PagedAttention, "__call__", attends_on(device))
    patch.setattr(async_decode, "sampler_for", lambda _: SimulatedSampler(device))
    patch.setitem(DENSE_LINEARS._homes, "cuda", f"{__name__}:SimulatedLinear")
    patch.setattr(SimulatedLinear, "device", device, raising=False)
    patch.setitem(ELEMENTWISE._homes, "cuda", f"{__name__}:SimulatedKernels")
    patch.setattr(SimulatedKernels, "device", device, raising=False)
    patch.setattr("raylm.worker.gpu.batch_buckets._NARROWEST", 32)
    patch.setattr("raylm.worker.gpu.batch_buckets._MOST_TOKENS", 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def wanted(path: Path) -> dict[tuple[int, ...], list[int]]:
    """The prompt and the answer for each prompt."""
    reference = Reference(path)
    return {tuple(prompt): reference.greedy(prompt, NEW_TOKENS) for prompt in (*PROMPTS, *SHARING)}


@pytest.mark.parametrize(
    ("prompts", "cache", "scheduler"),
    [
        (PROMPTS, {"num_blocks": 96}, {}),
        (PROMPTS, {"num_blocks": 12}, {"max_num_batched_tokens": 16, "max_num_seqs": 5}),
        (SHARING, {"num_blocks": 96}, {"max_num_seqs": 2}),
    ],
    ids=["8-at-once", "preempted-in-chunks", "warm-prefix-cache"],
)
def test_greedy_tokens_equal_transformers(
    machine: Gpu,
    path: Path,
    wanted: dict[tuple[int, ...], list[int]],
    prompts: list[list[int]],
    cache: dict[str, Any],
    scheduler: dict[str, Any],
) -> None:
    drawn, _ = serve(path, prompts, cache, scheduler)
    for key, prompt in enumerate(prompts):
        assert prompt + drawn[key] == wanted[tuple(prompt)]
    assert machine.replays > NEW_TOKENS // 2


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"top_p": 0.9},
    {"temperature": 1.1, "top_k": 5},
    {"min_p": 0.1, "min_tokens": 4},
    {"temperature": 1.5, "top_p": 0.999, "top_k": 300},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {3: 5.0, 7: -100.0}, "allowed_token_ids": [3, 5, 6, 7]},
]


@pytest.mark.parametrize("scheduler", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}], ids=["whole", "chunks"])
def test_all_wishes_draw_what_they_draw_on_a_cpu(machine: Gpu, path: Path, scheduler: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=8, seed=at, **wish) for at, wish in enumerate(WISHES)]
    here, there = (serve(path, PROMPTS, {"num_blocks": 96}, scheduler, params, device)[0] for device in ("cpu", "cuda"))
    assert there == here
    assert machine.replays


@pytest.mark.long
def test_transformers_modeling_is_captured_too(machine: Gpu, tmp_path: Path) -> None:
    from tests.models.transformers_backend.families import make_family

    make_family(tmp_path, "Olmo2ForCausalLM")
    here, there = (serve(tmp_path, PROMPTS[:3], {"num_blocks": 96}, {}, device=device)[0] for device in ("cpu", "cuda"))
    assert there == here
    assert machine.replays


def start(path: Path, **config: Any) -> ModelRunner:
    tree = {"model": str(path), "device": "cuda", "cache": {"num_blocks": 64, "block_size": 16}}
    return start_runner(Config.model_validate(tree | {"scheduler": {"max_num_seqs": 4}} | config))[0]


@pytest.fixture(scope="module")
def events(path: Path) -> dict[int, list[int]]:
    """The tokens of joining and leaving sequences on a CPU."""
    return eventful(Life(start(path, device="cpu"), 1))


@pytest.mark.parametrize("is_fast", [False, True], ids=["slow", "fast"])
def test_sequences_come_and_go(machine: Gpu, path: Path, events: dict[int, list[int]], is_fast: bool) -> None:
    machine.is_fast = is_fast
    assert eventful(Life(start(path), 2)) == events
    assert machine.replays > 15


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_time_of_a_step_is_its_own(machine: Gpu, path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """The device takes a second for each forward pass, and everything else takes no time. Steps are queued."""
    life, now = Life(start(path), ahead), 0.0
    forward = life.runner.forward
    hidden = forward.hidden

    def take_a_second() -> None:
        nonlocal now
        now += 1.0

    def slow(inputs: StepInputs) -> Tensor:
        machine.launch(take_a_second)
        return hidden(inputs)

    monkeypatch.setattr(forward, "hidden", slow)
    for module in ("model_runner", "gpu.async_decode"):
        monkeypatch.setattr(f"raylm.worker.{module}.time", SimpleNamespace(perf_counter=lambda: now))
    life.add(0, random_prompt(5, 0), blocks(0))
    for _ in range(5):
        life.run()
    life.add(1, random_prompt(5, 1), blocks(1))  # a synchronous step after an asynchronous one
    for _ in range(5):
        life.run()
    life.end()
    assert life.step_s == [1.0] * 10


def test_the_profile_run_takes_the_memory_of_what_requests_may_ask(
    machine: Gpu, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalty counts, stored logits and the parts of a truncated draw are allocated before the pool is sized."""
    called: list[str] = []
    for owner, name in ((DevicePenalties, "_take_over"), (DeviceLogprobs, "describe"), (device_sampler, "truncate")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), called))
    monkeypatch.setattr(startup, "size_pool", noted(startup.size_pool, called))
    start(path)
    assert called == ["_take_over"] * 4 + ["truncate", "describe", "size_pool"]


def noted(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        called.append(function.__name__)
        return function(*args)

    return call


STEADY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"presence_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {3: 5.0}, "min_tokens": 30},
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("wish", STEADY, ids=str)
def test_a_steady_step_waits_for_nothing(machine: Gpu, path: Path, wish: dict[str, Any], graphs: bool) -> None:
    """Greedy, sampled, sampled from the most likely tokens, and with logits processors that need no host."""
    life = Life(start(path, engine={"cuda_graphs": graphs}), 2)
    for seq_id in range(3):
        life.add(seq_id, random_prompt(5, seq_id), blocks(seq_id), SamplingParams(**wish))
    for _ in range(4):
        life.run()
    machine.waits.clear()
    launched = [machine.launched]
    for _ in range(8):
        life.run()
        launched.append(machine.launched)
    assert machine.waits == []
    each = set(np.diff(launched).tolist())
    assert len(each) == 1, "some steps launch more than others"
    assert each.pop() < (40 if wish == {"temperature": 0.0} else 300) + 60 * (not graphs)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_with_a_prompt_waits_for_nothing(machine: Gpu, path: Path, graphs: bool) -> None:
    """The steps before and after it do not wait either."""
    life = Life(start(path, engine={"cuda_graphs": graphs}), 2)
    life.add(0, random_prompt(5, 0), blocks(0), SamplingParams(temperature=0.8))
    for _ in range(3):
        life.run()
    machine.waits.clear()
    for seq_id in (1, 2, 3):
        life.add(seq_id, random_prompt(6 + seq_id, seq_id), blocks(seq_id))
        for _ in range(seq_id):
            life.run()
    assert machine.waits == []


def one_set_of_buffers(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner.async_decode, "_buffers", runner.async_decode._buffers[:1] * 2)  # type: ignore[attr-defined]


def one_place_for_tokens(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner.async_decode, "_tokens", runner.async_decode._tokens[:1] * 2)  # type: ignore[attr-defined]


def outputs_that_do_not_wait(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", lambda self: None)


def padding_in_a_live_block(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner.forward._buffers, "_scratch_block", 0)  # type: ignore[attr-defined]


def stale_lengths(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        patch.setattr(runner.forward._buffers, "_seq_lens", torch.ones(4, dtype=torch.int32, device="cuda"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "is_fast"),
    [
        (one_set_of_buffers, False),
        (outputs_that_do_not_wait, False),
        (one_place_for_tokens, True),
        (padding_in_a_live_block, True),
        (stale_lengths, True),
    ],
)
def test_planted_faults_are_seen(
    machine: Gpu, path: Path, events: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, fault: Any, is_fast: bool
) -> None:
    machine.is_fast = is_fast
    runner = start(path)
    fault(runner, monkeypatch)
    assert eventful(Life(runner, 2)) != events


def test_who_waits_while_a_graph_is_recorded_is_told(machine: Gpu, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModuleForward.run_planned

    def looking(self: ModuleForward, input_ids: Tensor, positions: Tensor, plan: object) -> Tensor:
        assert int(positions.max()) >= 0
        return forward(self, input_ids, positions, plan)

    monkeypatch.setattr(ModuleForward, "run_planned", looking)
    with pytest.raises(AssertionError, match="the host waits while a graph is recorded"):
        start(path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_takes_few_launches(machine: Gpu, tmp_path: Path, family: str) -> None:
    """Four products, two norms with sums, rotation with the KV write, two attention kernels, and SiLU."""
    counts = []
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        make_checkpoint(folder, family, tokenizer=False, num_hidden_layers=layers)
        life = Life(start(folder, engine={"cuda_graphs": False}), 2)
        life.add(0, random_prompt(5, 0), blocks(0))
        for _ in range(4):
            life.run()
        before = machine.launched
        life.run()
        counts.append(machine.launched - before)
        life.end()
    second_kernel_of_attention = 1  # which merges splits
    assert counts[1] - counts[0] + second_kernel_of_attention == 10


def test_a_step_with_a_prompt_is_one_launch_whatever_its_layers(machine: Gpu, tmp_path: Path) -> None:
    """Plus the copies into its buffers and the sampler's launches. Without graphs, each layer has 13 launches."""
    counts: dict[bool, list[int]] = {True: [], False: []}
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        make_checkpoint(folder, "llama", tokenizer=False, num_hidden_layers=layers)
        for graphs, found in counts.items():
            life = Life(start(folder, engine={"cuda_graphs": graphs}), 1)
            life.add(0, random_prompt(5, 0), blocks(0))
            life.run()
            life.add(1, random_prompt(20, 1), blocks(1))
            before = machine.launched, machine.replays
            life.run()
            found.append(machine.launched - before[0])
            assert machine.replays - before[1] == graphs
    assert counts[True][0] == counts[True][1] < 50
    assert counts[False][1] - counts[False][0] == 13  # and on a GPU both calls of attention have a second kernel


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM"])
def test_logits_are_not_rounded_to_bfloat16(machine: Gpu, tmp_path: Path, architecture: str) -> None:
    """As on a CPU: of two tokens with the same rounded logit, the better one must be drawn."""
    from tests.models.transformers_backend.families import make_family

    make_family(tmp_path, architecture)
    with torch.inference_mode():
        model, _ = load_model(Checkpoint(tmp_path), torch.bfloat16, torch.device("cuda"))
        logits = model.logits(torch.randn(3, 64, device="cuda").bfloat16()).cpu()
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).float().mean() > 0.9

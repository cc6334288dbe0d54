"""Two ranks on simulated GPUs in threads, with gloo for NCCL, draw a CPU's tokens, with graphs that contain sums."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from raylm.checkpoint import EMBEDDED
from raylm.config import Config
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.grammar import grammar_of
from raylm.messages import EngineCoreRequest
from raylm.models import Ranks
from raylm.params import SamplingParams, StructuredOutputs
from raylm.worker import Worker
from raylm.worker.distributed import process_group
from raylm.worker.gpu import cuda_graphs, prompt_graphs
from raylm.worker.gpu.cuda_graphs import GraphForward
from raylm.worker.gpu.probe import probe
from tests.checkpoints import EOS, make_checkpoint
from tests.worker.gpu.simulated_gpu import Gpu, replaced, using
from tests.worker.gpu.test_simulated_gpu import WISHES, SimulatedKernels, equip
from tests.worker.test_worker_with_scheduler import GREEDY, PROMPTS
from tests.worker.two_in_flight import play

T = TypeVar("T")


class Machine(threading.local):
    """A machine with one GPU for each thread."""

    def __init__(self) -> None:
        self.gpu = Gpu()

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.gpu.kernel(function)(*args)


def in_place_of_nccl(store: Store, rank: int, size: int) -> Backend:
    return process_group._gloo(PrefixStore("nccl", store), rank, size)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    here = Machine()
    equip(monkeypatch, here)
    monkeypatch.setattr(process_group, "_nccl", in_place_of_nccl)
    with replaced(monkeypatch, lambda: here.gpu):
        yield here
    probe.cache_clear()


def on_ranks(machine: Machine, size: int, path: Path, work: Callable[[Worker], T], **config: Any) -> list[T]:
    """The results of ``work`` on each rank's started worker."""
    engine = {"threads": 1, "tensor_parallel_size": size}
    tree = {"model": str(path), "device": "cuda", "dtype": "float32", "cache": {"num_blocks": 96, "block_size": 16}}
    tree |= {"scheduler": {"max_num_seqs": 8}, "max_model_len": 128, "engine": engine}
    workers = [Worker(Config.model_validate(tree | config), rank) for rank in range(size)]
    meeting = workers[0].open_rendezvous()

    def run(worker: Worker) -> T:
        with using(machine.gpu):
            worker.start(meeting)
            return work(worker)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, workers))


def serve(worker: Worker, requests: Sequence[EngineCoreRequest]) -> dict[int, list[int]]:
    """The drawn tokens by request."""
    scheduler = worker._config.scheduler
    core = Scheduler(scheduler, KVCacheManager(96, 16), 128)
    for request in requests:
        core.add("client", request)
    drawn: dict[int, list[int]] = defaultdict(list)
    for news in play(core, worker):
        at = 0
        for key, count in zip(news.keys, news.token_counts, strict=True):
            drawn[key] += news.token_ids[at : at + count]
            at += count
    return drawn


def alone(path: Path, requests: Sequence[EngineCoreRequest]) -> dict[int, list[int]]:
    """The tokens that a CPU draws."""
    worker = Worker(Config.model_validate({"model": str(path), "device": "cpu", "dtype": "float32"}))
    worker.start()
    return serve(worker, requests)


def requests(params: Sequence[SamplingParams], **more: Any) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(key, str(key), prompt, wish, eos_token_ids=(EOS,), **more)
        for key, (prompt, wish) in enumerate(zip(PROMPTS, params, strict=False))
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param({"max_num_seqs": 4}, id="waiting"),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="chunks", marks=pytest.mark.long),
    ],
)
def test_two_ranks_draw_what_a_cpu_draws(machine: Machine, path: Path, scheduler: dict[str, Any]) -> None:
    """With every sampling parameter."""
    asked = requests([SamplingParams(max_tokens=8, seed=at, **wish) for at, wish in enumerate(WISHES)])

    def run(worker: Worker) -> tuple[dict[int, list[int]], int]:
        return serve(worker, asked), machine.gpu.replays

    (first, replays), (second, others) = on_ranks(machine, 2, path, run, scheduler=scheduler)
    assert first == second == alone(path, asked)
    assert replays == others > 5


@pytest.mark.long
def test_structured_rows_of_two_ranks(machine: Machine) -> None:
    asked = requests([SamplingParams(max_tokens=9, seed=at, temperature=0.9) for at in range(4)])
    for at, regex in enumerate(("[0-9]{3}-[0-9]{2}", "[ab]+c")):
        asked[at] = replace(asked[at], grammar=grammar_of(StructuredOutputs(regex=regex)))
    first, second = on_ranks(machine, 2, EMBEDDED, lambda worker: serve(worker, asked))
    assert first == second == alone(EMBEDDED, asked)


@pytest.mark.long
def test_sums_are_inside_the_graphs(machine: Machine, tmp_path: Path) -> None:
    """The number of launches of a decoding step does not depend on the layers.

    Only logits are exchanged outside of graphs.
    """

    def run(worker: Worker) -> tuple[int, int, int]:
        seen = []
        forward = worker._started_runner.launch

        def launch(plan: Any) -> Any:
            before = machine.gpu.launched, machine.gpu.replays, machine.gpu.exchanges
            pending = forward(plan)
            after = machine.gpu.launched, machine.gpu.replays, machine.gpu.exchanges
            seen.append(tuple(b - a for a, b in zip(before, after, strict=True)))
            return pending

        worker._started_runner.launch = launch  # type: ignore[method-assign]
        serve(worker, requests([GREEDY]))
        return seen[10]  # type: ignore[return-value]

    found = []
    for layers in (2, 3):
        folder = make_checkpoint(tmp_path / str(layers), "llama", tokenizer=False, num_hidden_layers=layers)
        found.append(on_ranks(machine, 2, folder, run))
    assert found[0] == found[1]
    assert [(replays, exchanges) for _, replays, exchanges in found[0]] == [(1, 1), (1, 1)]


class Lacking:
    """While capturing, one rank runs out of memory in the middle of a step, at every second size."""

    def __init__(self, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        self._machine, self._starting = machine, threading.local()
        gate, start = SimulatedKernels.silu_and_mul, GraphForward.capture_at_start

        def silu_and_mul(kernels: SimulatedKernels, gate_up: Tensor) -> Tensor:
            if getattr(self._starting, "rank", 0) and len(gate_up) in (2, 8, 64):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return gate(kernels, gate_up)

        def capture_at_start(forward: GraphForward) -> None:
            self._starting.rank = forward._ranks.rank
            start(forward)
            self._starting.rank = 0

        patch.setattr(SimulatedKernels, "silu_and_mul", silu_and_mul)
        patch.setattr(GraphForward, "capture_at_start", capture_at_start)


def sizes(worker: Worker) -> tuple[dict[int, list[int]], list[int], list[int]]:
    """The drawn tokens, and the sizes of captured steps without and with prompts."""
    forward: Any = worker._started_runner.forward
    drawn = serve(worker, requests([GREEDY] * len(PROMPTS)))
    captured = {size for (size, *_), graph in forward._graphs.items() if graph is not None}
    return drawn, sorted(captured), sorted({size for size, _ in forward._with_prompts._graphs})


@pytest.mark.long
def test_a_graph_that_one_rank_has_no_memory_for_is_captured_by_none(
    machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Lacking(machine, monkeypatch)
    with caplog.at_level(logging.WARNING):
        first, second = on_ranks(machine, 2, path, sizes, scheduler={"max_num_seqs": 16})
    assert first == second
    assert first[0] == alone(path, requests([GREEDY] * len(PROMPTS)))
    assert first[1:] == ([1, 4, 16], [])
    assert "Steps of 8 sequences are slower, because their CUDA graph has no memory: CUDA out of memory" in caplog.text
    assert "because their CUDA graph has no memory: another rank has none" in caplog.text


@pytest.mark.long
def test_ranks_that_did_not_agree_would_be_seen(machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: only one of two ranks has graphs."""

    def by_itself(ranks: Ranks, attempt: Callable[[], T]) -> T:
        captured = attempt()
        if ranks.rank:
            raise torch.OutOfMemoryError
        return captured

    for module in (cuda_graphs, prompt_graphs):
        monkeypatch.setattr(module, "on_all_ranks", by_itself)
    with pytest.raises(AssertionError, match="is captured by some ranks, and by others not"):
        on_ranks(machine, 2, path, sizes)

"""Pipeline stages of one model in threads draw the same tokens as one worker, bit for bit, whatever the schedule."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from raylm.config import Config
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.errors import ConfigError, PeerLostError
from raylm.grammar import grammar_of
from raylm.messages import EngineCoreRequest, Logprobs, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.params import SamplingParams
from raylm.params import StructuredOutputs as Spec
from raylm.worker import startup
from raylm.worker.distributed.rendezvous import LOOPBACK, Rendezvous, open_rendezvous
from raylm.worker.forward import ModuleForward, NativeForward
from raylm.worker.model_runner import ModelRunner
from raylm.worker.sampling.structured_outputs import StructuredOutputsProcessor
from raylm.worker.startup import start_runner
from tests.checkpoints import EOS, FAMILIES, make_checkpoint
from tests.ranks import one_at_a_time
from tests.worker.driver import random_prompt
from tests.worker.two_in_flight import play


@pytest.fixture(autouse=True)
def _load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "load_model", one_at_a_time(startup.load_model))


class Stages:
    """All workers of an engine, each in a thread, with the interface of one worker."""

    def __init__(self, config: Config, addresses: Sequence[str] = ()) -> None:
        """``addresses`` are the addresses of the workers' nodes. By default all workers are on one node."""
        self.config = config
        size = config.engine.pipeline_parallel_size * config.engine.tensor_parallel_size
        self.threads = [ThreadPoolExecutor(1) for _ in range(size)]
        addresses = addresses or [LOOPBACK] * size
        first = open_rendezvous(addresses[0]) if size > 1 else Rendezvous()
        meetings = [first, *(Rendezvous(rank, first.path, addresses[rank]) for rank in range(1, size))]
        starting = [thread.submit(start_runner, config, at) for thread, at in zip(self.threads, meetings, strict=True)]
        started = [each.result() for each in starting]
        self.runners: list[ModelRunner] = [runner for runner, _ in started]
        self.infos: list[WorkerInfo] = [info for _, info in started]

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step on all workers. The output is that of the first rank of the last stage."""
        steps = [thread.submit(runner.execute, plan) for thread, runner in zip(self.threads, self.runners, strict=True)]
        return lambda: [step.result() for step in steps][-self.config.engine.tensor_parallel_size]


Drawn = dict[tuple[int, int], list[int]]  # by (request, index)
Served = tuple[Drawn, list[Logprobs | None], dict[int, Logprobs], Scheduler, Stages]


def serve(
    path: Path, prompts: Sequence[list[int]], params: Sequence[SamplingParams], stages: int, **more: Any
) -> Served:
    """Serve all prompts at once. Returns tokens, their logprobs, prompt logprobs, the scheduler, and the stages."""
    engine = {"threads": 1, "pipeline_parallel_size": stages} | more.pop("engine", {})
    grammars = more.pop("grammars", {})
    config = Config.model_validate({"model": str(path), "engine": engine, **more})
    workers = Stages(config)
    info = workers.infos[-1]
    kv = KVCacheManager(info.num_blocks, info.block_size)
    core = Scheduler(config.scheduler, kv, info.max_model_len, stages=stages)
    for key, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
        core.add("client", EngineCoreRequest(key, str(key), prompt, wish, (EOS,), grammar=grammars.get(key)))
    drawn: Drawn = defaultdict(list)
    logprobs: list[Logprobs | None] = []
    of_prompts: dict[int, Logprobs] = {}
    for news in play(core, workers, config.steps_in_flight):
        assert not news.errors
        at = 0
        for key, index, count in zip(news.keys, news.indexes, news.token_counts, strict=True):
            drawn[key, index] += news.token_ids[at : at + count]
            at += count
        of_prompts |= dict(news.prompt_logprobs)
        logprobs.append(news.logprobs)
    return drawn, logprobs, of_prompts, core, workers


def chosen(logprobs: list[Logprobs | None]) -> list[tuple[int, float]]:
    """All reported (token, log-probability) pairs, sorted, because several stages change the order of steps."""
    found = [each for each in logprobs if each is not None]
    return sorted(pair for each in found for pair in zip(each.token_ids, each.logprobs, strict=True))


PROMPTS = [random_prompt(20 + 7 * seed, seed) for seed in range(8)]
SHARING = [random_prompt(48, 99) + random_prompt(5, seed) for seed in range(8)]
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=20, seed=3),
    SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, logprobs=3, max_tokens=31, seed=4),
    SamplingParams(temperature=1.3, top_p=0.9, prompt_logprobs=2, max_tokens=1, seed=5),
    SamplingParams(temperature=0.9, min_p=0.05, max_tokens=24, seed=6, n=3),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, seed=8, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=24),
]
LAYERS = {"num_hidden_layers": 5}


@pytest.mark.parametrize(
    ("stages", "dtype", "more"),
    [
        (2, "float32", {"cache": {"num_blocks": 160}}),
        (3, "bfloat16", {"cache": {"num_blocks": 160}, "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 9}}),
        (2, "bfloat16", {"cache": {"num_blocks": 14}}),
        (4, "float32", {"cache": {"num_blocks": 9}, "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 5}}),
        (2, "float32", {"cache": {"num_blocks": 160}, "scheduler": {"steps_in_flight": 1}}),
        (5, "float32", {"cache": {"num_blocks": 160}, "quantization": "int8"}),
    ],
    ids=["two", "three-in-chunks", "preempted", "four-preempted-in-chunks", "fewer-in-flight", "five-quantized"],
)
def test_stages_draw_what_one_worker_draws(tmp_path: Path, stages: int, dtype: str, more: dict[str, Any]) -> None:
    sizes = LAYERS if "quantization" not in more else LAYERS | {"intermediate_size": 128}
    make_checkpoint(tmp_path, "qwen3", dtype=getattr(torch, dtype), tokenizer=False, **sizes)
    wanted, logprobs, of_prompts, _, _ = serve(tmp_path, PROMPTS, MIXED, 1, **more)
    drawn, found, found_of_prompts, core, workers = serve(tmp_path, PROMPTS, MIXED, stages, **more)
    assert drawn == wanted
    assert chosen(found) == chosen(logprobs)
    assert found_of_prompts == of_prompts
    assert (core.counters.preemptions > 0) == (more["cache"]["num_blocks"] < 20)
    assert all(isinstance(runner.forward, NativeForward) for runner in workers.runners)
    assert len({info.fingerprint for info in workers.infos}) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_has_stages(tmp_path: Path, family: str, tied: bool) -> None:
    make_checkpoint(tmp_path, family, tokenizer=False, tie_word_embeddings=tied, **LAYERS)
    more = {"cache": {"num_blocks": 160}}
    alone, _, _, _, whole = serve(tmp_path, SHARING, MIXED, 1, **more)
    drawn, _, _, core, workers = serve(tmp_path, SHARING, MIXED, 2, **more)
    assert drawn == alone
    assert core.counters.prefix_hits >= 6 * 48
    first, last = workers.infos
    assert (first.layers, last.layers) == ((0, 2), (3, 4))
    assert first.weights_bytes + last.weights_bytes == whole.infos[0].weights_bytes + (320 * 64 * 4 if tied else 0)
    assert first.kv_cache_bytes * 2 == last.kv_cache_bytes * 3
    assert whole.infos[0].layers is None


def test_ranks_share_each_stage(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, **LAYERS)
    more = {"cache": {"num_blocks": 160}}
    wanted, _, _, _, _ = serve(tmp_path, PROMPTS, MIXED, 1, engine={"tensor_parallel_size": 2}, **more)
    drawn, _, _, _, workers = serve(tmp_path, PROMPTS, MIXED, 2, engine={"tensor_parallel_size": 2}, **more)
    assert drawn == wanted
    assert [info.layers for info in workers.infos] == [(0, 2), (0, 2), (3, 4), (3, 4)]
    assert all(isinstance(runner.forward, ModuleForward) for runner in workers.runners)


def test_a_late_mask_is_late_for_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that skips its draw computes its last token again, in every stage."""
    make_checkpoint(tmp_path, "qwen3", **LAYERS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["b"]}
    grammars = dict.fromkeys((1, 4), grammar_of(Spec(json=schema)))
    more: dict[str, Any] = {"cache": {"num_blocks": 160}, "grammars": grammars}
    params = [SamplingParams(temperature=0.8, max_tokens=30, seed=key) for key in range(8)]
    wanted, _, _, _, _ = serve(tmp_path, PROMPTS, params, 1, **more)
    apply, calls = StructuredOutputsProcessor.apply, [0]

    def sometimes_late(self: StructuredOutputsProcessor, *args: Any) -> None:
        apply(self, *args)
        calls[0] += 1
        if calls[0] % 3 == 0:
            self.late = args[1].tolist()

    monkeypatch.setattr(StructuredOutputsProcessor, "apply", sometimes_late)
    drawn, _, _, _, workers = serve(tmp_path, PROMPTS, params, 3, **more)
    assert [runner.pipeline.has_deferred for runner in workers.runners[:2]] == [True, True]
    assert drawn == wanted


def test_stages_have_as_many_blocks_as_the_one_with_the_fewest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, **LAYERS)
    monkeypatch.setattr("raylm.worker.kv_cache.available_memory", lambda: 64 << 20)
    engine = {"pipeline_parallel_size": 2, "threads": 1}
    config = {"model": str(tmp_path), "scheduler": {"max_num_seqs": 400}, "engine": engine}
    infos = Stages(Config.model_validate(config)).infos
    a_block = 3 * 16 * 2 * 2 * 16 * 4  # layers of the first stage, tokens, k and v, heads, head_dim, bytes
    assert [info.num_blocks for info in infos] == [int((64 << 20) // 2 * 0.4) // a_block] * 2


def test_stages_on_several_nodes_meet_at_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage gets its share of the threads and memory of its own node. Loopback addresses stand for nodes."""
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, **LAYERS)
    monkeypatch.setattr("raylm.worker.kv_cache.available_memory", lambda: 64 << 20)
    asked: list[int | None] = []
    available = startup.available_threads
    monkeypatch.setattr(
        startup, "available_threads", lambda engine, beside=None: asked.append(beside) or available(engine, beside)
    )
    engine = {"pipeline_parallel_size": 3, "threads": 1}  # all stages here share the process's only team of threads
    config = {"model": str(tmp_path), "scheduler": {"max_num_seqs": 400}, "engine": engine}
    workers = Stages(Config.model_validate(config), ["127.0.0.2", "127.0.0.3", "127.0.0.2"])
    a_block = 2 * 16 * 2 * 2 * 16 * 4  # layers, tokens, k and v, heads, head_dim, bytes
    assert {info.num_blocks for info in workers.infos} == {int((64 << 20) // 2 * 0.4) // a_block}
    assert sorted(beside for beside in asked if beside) == [1, 2, 2]
    core = Scheduler(workers.config.scheduler, KVCacheManager(workers.infos[0].num_blocks, 16), 256, stages=3)
    core.add("client", EngineCoreRequest(0, "0", PROMPTS[0], MIXED[0]))
    tokens = [token for news in play(core, workers, 4) for token in news.token_ids]
    assert tokens == serve(tmp_path, PROMPTS[:1], MIXED[:1], 1, cache={"num_blocks": 160})[0][0, 0]


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    engine = {"pipeline_parallel_size": 3, "threads": 1}
    config = Config.model_validate({"model": str(tmp_path), "engine": engine})
    with pytest.raises(ConfigError, match=r"engine\.pipeline_parallel_size: 3 stages cannot share 2 layers"):
        Stages(config)


_GOES = """
import sys, os
from raylm.config import Config
from raylm.worker.distributed.rendezvous import Rendezvous
from raylm.worker.startup import start_runner
engine = {"pipeline_parallel_size": 2, "threads": 1}
start_runner(Config.model_validate({"model": sys.argv[2], "engine": engine}), Rendezvous(1, sys.argv[1]))
os._exit(9)
"""


def test_a_stage_does_not_wait_for_one_that_is_gone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    rendezvous = open_rendezvous()
    config = Config.model_validate({"model": str(path), "engine": {"pipeline_parallel_size": 2, "threads": 1}})
    with subprocess.Popen([sys.executable, "-c", _GOES, rendezvous.path, str(path)]) as other:
        runner, info = start_runner(config, rendezvous)
        assert other.wait() == 9
    core = Scheduler(config.scheduler, KVCacheManager(info.num_blocks, info.block_size), 256, stages=2)
    core.add("client", EngineCoreRequest(0, "0", PROMPTS[0], SamplingParams(max_tokens=4, seed=1)))
    first, second = core.schedule(), core.schedule()  # the second step needs the token of the first one
    assert first is not None
    assert second is not None
    with pytest.raises(PeerLostError, match="Stage 0 of 2 lost another one"):
        [runner.execute(plan) for plan in (first, second)]

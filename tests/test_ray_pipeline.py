"""Pipeline stages as Ray actors, on one and two nodes: the same tokens as one worker, and one cause of a lost stage."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylm import LLM, SamplingParams
from raylm.cli.serve_process import port_is_free
from raylm.config import Config
from raylm.engine import as_raylm_error
from raylm.engine.actor import create_engine_core
from raylm.engine.ray_executor import create_worker
from raylm.errors import ConfigError, EngineDiedError
from raylm.frontend.engines.ray_engine_client import connect_engine, own_node
from raylm.messages import EngineCoreRequest, EngineInfo
from tests.checkpoints import make_checkpoint
from tests.reference import greedy, random_prompts
from tests.serving import ARGS, Server, chat, free_port, serve_file
from tests.test_ray_tensor_parallel import answers

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

TOKENS = 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The ids of two nodes on this machine. This process's node is first, so that a Link to its EngineCore is possible.

    With Ray calls, an engine would be lost if the machine takes 3 s for one call.
    """
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    own = own_node()
    yield sorted((node["NodeID"] for node in ray.nodes()), key=lambda node: node != own)
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)


def divided(model: Path, stages: int, ranks: int = 1, **cache: Any) -> Config:
    return Config.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "cache": {"num_blocks": 256, **cache},
            "scheduler": {"max_num_batched_tokens": 64},
            "engine": {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks, "threads": 1},
        }
    )


@contextmanager
def engine(config: Config, nodes: list[str]) -> Iterator[tuple[ActorHandle, list[ActorHandle]]]:
    """An EngineCore on the first of ``nodes``, and the workers of each stage on one node each."""
    size = config.engine.tensor_parallel_size
    on = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    workers = [
        create_worker(config, rank, num_cpus=0.1, scheduling_strategy=on[rank // size])
        for rank in range(size * config.engine.pipeline_parallel_size)
    ]
    core = create_engine_core(config, uuid.uuid4().hex, "engine", workers, num_cpus=0.1, scheduling_strategy=on[0])
    try:
        yield core, workers
    finally:
        for actor in (core, *workers):
            ray.kill(actor)


@pytest.mark.parametrize(
    ("stages", "ranks", "apart", "cache"),
    [
        pytest.param(2, 1, False, {}, id="on one node", marks=pytest.mark.long),
        pytest.param(2, 1, True, {}, id="on two nodes"),
        pytest.param(2, 2, False, {}, id="of two ranks"),
        pytest.param(4, 1, True, {"num_blocks": 20}, id="four on two nodes, preempted"),
    ],
)
async def test_stages_give_the_tokens_of_one_worker(
    nodes: list[str], model: Path, stages: int, ranks: int, *, apart: bool, cache: dict[str, Any]
) -> None:
    prompts = random_prompts(8, 320, longest=90, shared=20)
    placed = [nodes[stage % 2 if apart else 0] for stage in range(stages)]
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}]
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, **kind) for kind in kinds]
    with engine(divided(model, stages, ranks, **cache), placed) as (core, _):
        info: EngineInfo = await core.start.remote()
        running = asyncio.ensure_future(core.run.remote())
        drawn = [await answers(core, prompts, each) for each in params]
        alone = await answers(core, prompts[:1], params[0])
        counters = (await core.load.remote()).stats.counters
        running.cancel()
    layers = [(stage.first, stage.last) for stage in info.worker.pipeline]
    assert layers == {2: [(0, 2), (3, 4)], 4: [(0, 0), (1, 1), (2, 3), (4, 4)]}[stages]
    assert (counters.preemptions > 0) == bool(cache)
    assert drawn[0] == greedy(model, prompts, TOKENS)
    assert alone == drawn[0][:1]
    with LLM(str(model), dtype="float32", cache={"num_blocks": 256}, engine={"threads": 1}) as one:
        for tokens, each in zip(drawn, params, strict=True):
            assert tokens == [result.token_ids for result in one.generate(prompts, each, progress=False)]


@pytest.mark.parametrize(
    ("victim", "apart"),
    [(0, False), (1, True), *(pytest.param(*both, marks=pytest.mark.long) for both in ((0, True), (1, False)))],
)
async def test_a_stage_that_is_killed_is_the_one_cause(
    nodes: list[str], model: Path, victim: int, *, apart: bool
) -> None:
    with engine(divided(model, 2), [nodes[0], nodes[apart]]) as (core, workers):
        await core.start.remote()
        run = asyncio.ensure_future(core.run.remote())
        client = await connect_engine(core)
        params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1, temperature=0.0)
        client.add(EngineCoreRequest(1, "1", [5, 6, 7], params))
        outputs = client.outputs()
        while not (await anext(outputs)).token_ids:
            pass
        ray.kill(workers[victim])
        async with asyncio.timeout(300):
            assert await run == f"The worker of stage {victim} was lost."
            with pytest.raises(EngineDiedError):
                [news async for news in outputs]
        await client.close()


async def test_what_stages_refuse_arrives_as_it_was_said(nodes: list[str], tmp_path: Path) -> None:
    with engine(divided(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2), 3), nodes[:1] * 3) as (core, _):
        with pytest.raises(RayError) as caught:
            await core.start.remote()
        error = as_raylm_error(caught.value)
        assert type(error) is ConfigError
        assert error.message == "engine.pipeline_parallel_size: 3 stages cannot share 2 layers."


def test_a_served_engine_loses_a_stage_and_comes_back_whole(tmp_path: Path) -> None:
    port = free_port()
    args = ARGS | {"engine": {"threads": 1, "pipeline_parallel_size": 2}}
    with Server(serve_file(tmp_path / "serve.yaml", port, args), port) as server:
        assert "stage 0 of 2 has layers 0 to " in server.log.read_text()
        question = chat("What is a KV cache?", max_tokens=40)
        before = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=300).json()
        assert "attention" in before["choices"][0]["message"]["content"]
        (told,) = httpx.get(f"{server.url}/v1/cluster", timeout=60).json()["engines"]
        assert told["workers"] == 2
        assert [stage["first"] for stage in told["stages"]] == [0, told["stages"][0]["last"] + 1]
        stages = server.processes("WorkerActor")
        assert len(stages) == 2
        os.kill(stages[1], signal.SIGKILL)
        server.wait_until(lambda: len(set(server.processes("WorkerActor")) - set(stages)) == 2, "has no new stages")
        server.wait_ready()
        after = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=300).json()
        assert after["choices"][0]["message"]["content"] == before["choices"][0]["message"]["content"]
        assert server.stop(signal.SIGINT) == 0
        assert server.processes() == []
        assert port_is_free("127.0.0.1", port)

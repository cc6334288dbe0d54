"""Two ranks as Ray actors over gloo: the same tokens as one worker, and one cause of a lost rank."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from raylm import LLM, SamplingParams
from raylm.checkpoint import EMBEDDED
from raylm.cli.serve_process import port_is_free
from raylm.config import Config
from raylm.engine import as_raylm_error
from raylm.engine.actor import create_engine_core
from raylm.engine.ray_executor import create_worker
from raylm.errors import ConfigError, EngineDiedError, PeerLostError
from raylm.frontend.engines.ray_engine_client import connect_engine
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from tests.checkpoints import make_checkpoint
from tests.fakes import FakeWorker
from tests.reference import greedy, random_prompts
from tests.serving import ARGS, Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

TOKENS = 24


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@contextmanager
def engine(config: Config) -> Iterator[tuple[ActorHandle, list[ActorHandle]]]:
    """An EngineCore and its workers, created as the supervisor creates them."""
    ranks = range(config.engine.tensor_parallel_size)
    workers = [create_worker(config, rank, num_cpus=0.1) for rank in ranks]
    core = create_engine_core(config, uuid.uuid4().hex, "engine", workers, num_cpus=0.1)
    try:
        yield core, workers
    finally:
        for actor in (core, *workers):
            ray.kill(actor)


def shared_by(ranks: int, model: Path) -> Config:
    return Config.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "cache": {"num_blocks": 256},
            "scheduler": {"max_num_batched_tokens": 64},
            "engine": {"tensor_parallel_size": ranks, "threads": 1},
        }
    )


async def answers(core: ActorHandle, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The tokens of all prompts, requested at the same time."""
    client = await connect_engine(core)
    for key, prompt in enumerate(prompts):
        client.add(EngineCoreRequest(key, str(key), prompt, params))
    found: list[list[int]] = [[] for _ in prompts]
    left, outputs = len(prompts), client.outputs()
    while left:
        news = await anext(outputs)
        tokens = iter(news.token_ids)
        for key, count, reason in zip(news.keys, news.token_counts, news.finish_reasons, strict=True):
            found[key] += [next(tokens) for _ in range(count)]
            left -= reason is not None
    await client.close()
    return found


def test_a_served_engine_loses_a_rank_and_comes_back_whole(tmp_path: Path) -> None:
    port = free_port()
    args = ARGS | {"engine": {"threads": 1, "tensor_parallel_size": 2}}
    with Server(serve_file(tmp_path / "serve.yaml", port, args), port) as server:
        assert "2 workers share every layer" in server.log.read_text()
        question = chat("What is a KV cache?", max_tokens=40)
        before = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=300).json()
        assert "attention" in before["choices"][0]["message"]["content"]
        ranks = server.processes("WorkerActor")
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        server.wait_until(lambda: len(set(server.processes("WorkerActor")) - set(ranks)) == 2, "has no new ranks")
        server.wait_ready()
        after = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=300).json()
        assert after["choices"][0]["message"]["content"] == before["choices"][0]["message"]["content"]
        assert len(server.processes("WorkerActor")) == 2
        assert not set(server.processes("WorkerActor")) & set(ranks)
        assert server.stop(signal.SIGINT) == 0
        assert server.processes() == []
        assert port_is_free("127.0.0.1", port)


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("model", ["embedded", "qwen3"])
async def test_two_ranks_give_the_tokens_of_one(model: str, tmp_path: Path) -> None:
    path = EMBEDDED if model == "embedded" else make_checkpoint(tmp_path, model)
    prompts = random_prompts(8, 320, longest=90, shared=20)
    with engine(shared_by(2, path)) as (core, _):
        await core.start.remote()
        running = asyncio.ensure_future(core.run.remote())
        drawn = [
            await answers(core, prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, **how))
            for how in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95})
        ]
        running.cancel()
    assert drawn[0] == greedy(path, prompts, TOKENS)
    with LLM(str(path), dtype="float32", cache={"num_blocks": 256}, engine={"threads": 1}) as alone:
        for tokens, temperature, top_p in zip(drawn, (0.0, 0.9), (1.0, 0.95), strict=True):
            params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=TOKENS, ignore_eos=True, seed=1)
            assert tokens == [result.token_ids for result in alone.generate(prompts, params, progress=False)]


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_is_killed_in_a_step_is_the_one_cause(victim: int) -> None:
    with engine(shared_by(2, EMBEDDED)) as (core, workers):
        await core.start.remote()
        run = asyncio.ensure_future(core.run.remote())
        client = await connect_engine(core)
        params = SamplingParams(max_tokens=900, ignore_eos=True, seed=1, temperature=0.0)
        client.add(EngineCoreRequest(1, "1", [5, 6, 7], params))
        outputs = client.outputs()
        while not (await anext(outputs)).token_ids:
            pass
        ray.kill(workers[victim])
        async with asyncio.timeout(300):
            assert await run == f"The worker of rank {victim} was lost."
            with pytest.raises(EngineDiedError):
                [news async for news in outputs]
        await client.close()


class FakeRank(FakeWorker):
    """A rank without a model."""

    def address(self) -> str:
        """An address that no other rank uses."""
        return "127.0.0.1"

    def open_rendezvous(self, address: str) -> str:
        """No other rank connects."""
        return "nowhere"

    def start(self, meeting: str = "", address: str = "") -> WorkerInfo:
        """Start without other ranks."""
        return super().start()


class WaitingRank(FakeRank):
    """A rank that waits forever for another rank."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Block."""
        time.sleep(600)
        raise AssertionError


class LeftRank(FakeRank):
    """A rank that notices the loss of another rank."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Raise PeerLostError."""
        raise PeerLostError("Rank 0 of 2 lost another one.")


class FailingRank(FakeRank):
    """A rank that fails by itself after 0.2 s."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Fail after a delay."""
        time.sleep(0.2)
        raise RuntimeError("out of everything")


@pytest.mark.usefixtures("_cluster")
async def test_what_one_rank_found_wrong_is_told_whatever_the_others_do() -> None:
    workers = [ray.remote(kind).options(num_cpus=0.1).remote() for kind in (WaitingRank, LeftRank, FailingRank)]
    core = create_engine_core(shared_by(3, EMBEDDED), uuid.uuid4().hex, "engine", workers, num_cpus=0.1)
    await core.start.remote()
    run = asyncio.ensure_future(core.run.remote())
    client = await connect_engine(core)
    client.add(EngineCoreRequest(1, "1", [5, 6, 7], SamplingParams(max_tokens=5, seed=1)))
    async with asyncio.timeout(300):
        assert await run == "RuntimeError: out of everything"
    await client.close()
    for actor in (core, *workers):
        ray.kill(actor)


@pytest.mark.long
@pytest.mark.usefixtures("_cluster")
async def test_a_rank_that_is_lost_is_told_while_the_others_wait_for_it() -> None:
    """On GPUs the waiting ranks notice nothing: NCCL's sums do not end, and sums in graphs are not watched."""
    workers = [ray.remote(WaitingRank).options(num_cpus=0.1).remote() for _ in range(2)]
    core = create_engine_core(shared_by(2, EMBEDDED), uuid.uuid4().hex, "engine", workers, num_cpus=0.1)
    await core.start.remote()
    run = asyncio.ensure_future(core.run.remote())
    client = await connect_engine(core)
    client.add(EngineCoreRequest(1, "1", [5, 6, 7], SamplingParams(max_tokens=5, seed=1)))
    async with asyncio.timeout(300):
        while not (await core.load.remote()).held:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    ray.kill(workers[1])
    async with asyncio.timeout(300):
        assert await run == "The worker of rank 1 was lost."
    await client.close()
    for actor in (core, workers[0]):
        ray.kill(actor)


@pytest.mark.usefixtures("_cluster")
async def test_what_the_ranks_refuse_arrives_as_it_was_said() -> None:
    with engine(shared_by(3, EMBEDDED)) as (core, _):
        with pytest.raises(RayError) as caught:
            await core.start.remote()
        error = as_raylm_error(caught.value)
        assert type(error) is ConfigError
        assert error.message == "engine.tensor_parallel_size: 3 ranks cannot share 4 attention heads evenly."

"""Greedy tokens over HTTP equal transformers' generate, with batches, preemptions, chunks and cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm import checkpoint
from raylm.config import CacheConfig, Config, EngineConfig, SchedulerConfig
from raylm.engine import EngineCore, LocalExecutor
from raylm.frontend import AsyncLLM, LocalEngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import EngineInfo
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.engine.integrity import check_kv
from tests.reference import greedy, random_prompts

MAX_TOKENS = 20
MODEL = "under-test"


@pytest.fixture(scope="module", params=["embedded", *FAMILIES])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "embedded":
        return checkpoint.EMBEDDED
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@asynccontextmanager
async def server(path: Path, cache: dict[str, Any], scheduler: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP app with an AsyncLLM and an engine in this process."""
    config = Config(
        model=str(path),
        served_model_name=MODEL,
        dtype="float32",
        max_model_len=128,
        cache=CacheConfig(**{"num_blocks": 512} | cache),
        scheduler=SchedulerConfig(**scheduler),
        engine=EngineConfig(executor="local", threads=2),
    )
    core = EngineCore(config, LocalExecutor(config))
    worker = await core.start()
    running = asyncio.create_task(core.run())
    llm = AsyncLLM(config)
    llm.add_engine(LocalEngineClient(core, EngineInfo("local", worker.max_model_len, worker)))
    try:
        transport = httpx.ASGITransport(build_asgi_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            yield client
        check_kv(core.scheduler.kv)
        assert not core.scheduler.has_work
    finally:
        await llm.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await core.shutdown()


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
    """(token ids, cached prompt tokens) of one greedy answer."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of the series of one metric in /metrics."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one step in flight": ({}, {"steps_in_flight": 1}),
    "no prefix cache": ({"prefix_caching": False}, {}),
    "chunks of 16": ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}),
    "blocks of 64": ({"block_size": 64}, {}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_many_at_once(model_path: Path, scenario: str) -> None:
    vocab_size = checkpoint.Checkpoint(model_path).config["vocab_size"]
    prompts = random_prompts(32, vocab_size)
    async with server(model_path, *SCENARIOS[scenario]) as client:
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
    assert [tokens for tokens, _ in answers] == greedy(model_path, prompts, MAX_TOKENS)


async def test_alone(model_path: Path) -> None:
    prompts = random_prompts(4, checkpoint.Checkpoint(model_path).config["vocab_size"], seed=1)
    async with server(model_path, {}, {}) as client:
        answers = [(await complete(client, prompt))[0] for prompt in prompts]
    assert answers == greedy(model_path, prompts, MAX_TOKENS)


async def test_with_preemptions(model_path: Path) -> None:
    prompts = random_prompts(32, checkpoint.Checkpoint(model_path).config["vocab_size"], seed=2)
    async with server(model_path, {"num_blocks": 16}, {"max_num_seqs": 12}) as client:
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
        assert await metric(client, "vllm:num_preemptions_total") > 0
    assert [tokens for tokens, _ in answers] == greedy(model_path, prompts, MAX_TOKENS)


async def test_with_a_warm_prefix_cache(model_path: Path) -> None:
    vocab_size = checkpoint.Checkpoint(model_path).config["vocab_size"]
    prompts = random_prompts(8, vocab_size, longest=30, shared=50, seed=3)
    async with server(model_path, {}, {}) as client:
        first = [await complete(client, prompt) for prompt in prompts]
        again = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
    expected = greedy(model_path, prompts, MAX_TOKENS)
    assert [tokens for tokens, _ in first] == expected
    assert [tokens for tokens, _ in again] == expected
    assert first[0][1] == 0
    assert all(cached >= 48 for _, cached in [*first[1:], *again])

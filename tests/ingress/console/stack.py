"""The whole front end with engines without a model, and readers of requests' records."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.engine import EngineCore
from raylm.frontend import AsyncLLM, LocalEngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import EngineInfo
from tests.fakes import FakeExecutor, FakeWorker
from tests.ingress.test_real_llm import MODEL

LOCAL = "http://localhost"
SMALL = {
    "model": "embedded", "cache": {"num_blocks": 12, "block_size": 16}, "max_model_len": 160,
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object", "properties": {}}}}


class Stack:
    """The app with engines without a model. Each step of them takes ``delay_s``."""

    def __init__(self, num_engines: int = 1, delay_s: float = 0.0, **config: Any) -> None:
        self.config = Config.model_validate(SMALL | config)
        executors = [FakeExecutor(FakeWorker(model=MODEL), delay_s) for _ in range(num_engines)]
        self.cores = [EngineCore(self.config, executor) for executor in executors]
        for executor in executors:
            executor.worker.num_blocks = self.config.cache.num_blocks or 0
        self.llm = AsyncLLM(self.config)
        self.app: Starlette = build_asgi_app(self.llm, self.config)
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Stack:
        for number, core in enumerate(self.cores):
            info = await core.start()
            self._loops.append(asyncio.create_task(core.run()))
            self.llm.add_engine(LocalEngineClient(core, EngineInfo(f"e{number}", info.max_model_len, info)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.llm.stop()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def client(self, host: str = "127.0.0.1", base_url: str = LOCAL, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, client=(host, 9)), base_url=base_url, timeout=300, **options
        )


async def life_of(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def seconds_of(life: dict[str, Any], *names: str) -> float:
    return sum(phase["seconds"] for phase in life["phases"] if phase["phase"] in names)


def check_adds_up(life: dict[str, Any]) -> None:
    total = sum(phase["seconds"] for phase in life["phases"])
    assert total == pytest.approx(life["wall_s"], rel=0.01, abs=1e-3)
    at = 0.0
    for phase in life["phases"]:
        assert phase["start_s"] == pytest.approx(at, abs=1e-4)
        at += phase["seconds"]

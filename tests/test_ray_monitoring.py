"""A real Prometheus, and Ray's metrics and dashboard, with two ingresses and two engines under load."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serving import ARGS, Server, chat, free_port, serve_file
from tests.test_monitoring import FOLDER, expanded, queries

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus: install the distribution's package"),
]

TWO = {"ingress": {"replicas": 2}, "engine": {"threads": 1, "replicas": 2}}
KEYS = "alice: sk-alice weight=2\nbob: sk-bob requests_per_minute=6\nwatch: sk-watch admin\n"
LIMIT_S = 300
WINDOW = "20s"
TOKEN = Path("~/.ray/auth_token").expanduser()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("monitoring"), free_port()
    (folder / "keys").write_text(KEYS)
    args = ARGS | TWO | {"ingress": TWO["ingress"] | {"api_keys_file": str(folder / "keys")}}
    with Server(serve_file(folder / "serve.yaml", port, args), port, "--dashboard") as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with the shipped configuration, but with the server's port, a key and short intervals."""
    assert PROMETHEUS is not None
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (folder / "key").write_text("sk-watch")
    shutil.copy(FOLDER / "rules.yaml", folder)
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"]["evaluation_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job |= {"scrape_interval": "3s", "authorization": {"credentials_file": "key"}}
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    words = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *words], cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def load(server: Server) -> AsyncIterator[None]:
    """Endless streams of two keys. One key is refused repeatedly."""

    async def ask(name: str, number: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            for _ in itertools.count():
                body = chat(f"Tell me about {number}.", stream=True, ignore_eos=True, max_tokens=24)
                answer = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": f"sk-{name}"})
                assert answer.status_code in (200, 429), answer.text
                await asyncio.sleep(0.3)

    tasks = [asyncio.create_task(ask("bob" if number > 3 else "alice", number)) for number in range(6)]
    try:
        yield
        assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def found(client: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    """The current series of a query whose values are numbers."""
    answer = (await client.get("/api/v1/query", params={"query": query})).json()
    assert answer["status"] == "success", answer
    series = answer["data"]["result"]
    return [one for one in series if one["value"][1] != "NaN"]


async def test_every_query_of_every_board_has_data_under_load(server: Server, prometheus: str) -> None:
    boards = {expanded(query, WINDOW): where for where, query in queries() if ": " in where}
    assert len(boards) > 30
    async with load(server), httpx.AsyncClient(base_url=prometheus, timeout=300) as client:
        deadline, empty = time.monotonic() + LIMIT_S, dict(boards)
        while empty and time.monotonic() < deadline:
            await asyncio.sleep(2)
            empty = {query: where for query, where in boards.items() if not await found(client, query)}
        assert empty == {}
        assert {one["metric"]["key"] for one in await found(client, "raylm:key_tokens_total")} == {"alice", "bob"}
        assert len(await found(client, "sum by (replica) (raylm:engines_ready) == 2")) == 2
        assert len(await found(client, "sum by (engine) (vllm:kv_cache_usage_perc)")) == 2
        groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
        faults = {rule["name"]: rule.get("lastError") for rule in groups[0]["rules"] if rule["health"] != "ok"}
        raised = [rule["name"] for rule in groups[0]["rules"] if rule["state"] != "inactive"]
    assert (faults, raised) == ({}, [])


async def test_what_is_counted_is_what_the_clients_got(server: Server, prometheus: str) -> None:
    """Ten answers of eight tokens end up in Prometheus as 80 tokens, whichever replica reports them."""
    query = 'sum(raylm:key_tokens_total{key="watch", kind="generation"})'
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        for number in range(10):
            body = chat(f"Hello {number}.", ignore_eos=True, max_tokens=8)
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": "sk-watch"})
            assert answer.json()["usage"]["completion_tokens"] == 8
    async with httpx.AsyncClient(base_url=prometheus, timeout=300) as client:
        counted, deadline = 0.0, time.monotonic() + 300
        while counted < 80 and time.monotonic() < deadline:
            await asyncio.sleep(1)
            counted = sum(float(series["value"][1]) for series in await found(client, query))
    assert counted == 80


def session(server: Server) -> Path:
    """Ray's session folder."""
    line = re.search(r"logs +(\S+)/logs$", server.log.read_text(), re.MULTILINE)
    assert line is not None
    return Path(line[1])


async def test_rays_own_metrics_have_ours_once(server: Server) -> None:
    (file,) = session(server).glob("metrics_export_port_*")
    url, wanted = (
        f"http://127.0.0.1:{file.read_text()}",
        re.compile(r"^ray_vllm_generation_tokens_total\{", re.MULTILINE),
    )
    text, deadline = "", time.monotonic() + LIMIT_S
    async with load(server), httpx.AsyncClient(timeout=300) as client:
        while len(wanted.findall(text)) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(1)
            text = (await client.get(url)).text
    told = wanted.findall(text)
    assert len(told) == 2, "one line for each engine, whichever replica reports it"
    assert "ray_vllm_time_to_first_token_seconds_bucket{" in text
    assert "ray_raylm_engines_wanted{" in text


async def test_rays_dashboard_is_there_and_knows_the_application(server: Server) -> None:
    server.wait_until(lambda: "dashboard at " in server.log.read_text(), "has no dashboard")
    address = re.search(r"dashboard at (http://[\w.:]+)", server.log.read_text())
    assert address is not None
    headers = {"authorization": f"Bearer {TOKEN.read_text().strip()}"} if TOKEN.exists() else {}
    async with httpx.AsyncClient(base_url=address[1], timeout=300, headers=headers) as client:
        assert "<html" in (await client.get("/")).text
        applications = (await client.get("/api/serve/applications/")).json()["applications"]
        actors = (await client.get("/logical/actors")).json()["data"]["actors"].values()
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        told = [
            (await client.get("/v1/cluster", headers={"x-api-key": f"sk-{key}"})).json() for key in ("watch", "bob")
        ]
    assert [one["dashboard"] for one in told] == [address[1], None], "only a key that may see the actors"
    assert applications["default"]["docs_path"] == "/console"
    assert set(applications["default"]["deployments"]) >= {"Ingress", "Engine"}
    names = [actor["name"] for actor in actors]
    assert sum(name.startswith("EngineCore:default:") for name in names) == 2
    assert sum(name.startswith("Worker 0 of EngineCore:default:") for name in names) == 2
    assert "ApplicationState:default" in names

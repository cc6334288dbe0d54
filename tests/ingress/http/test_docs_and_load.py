"""Other endpoints for operators, probes and browsers: /ping, /load, /docs, /metrics, and /v1/models."""

from __future__ import annotations

import asyncio
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.messages import LoRAAdapter
from raylm.version import VERSION
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, client_of, until
from tests.ingress.refused import CHAT_PATH, error_of


async def test_ping_is_a_probe_as_health_is(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    assert (await client.get("/ping")).status_code == 200
    llm.is_ready = False
    error_of(await client.get("/ping"), 503)


async def test_load_counts_the_requests_that_are_served(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    async def load() -> int:
        answer = await client.get("/load")
        assert answer.json().keys() == {"server_load"}
        found: int = answer.json()["server_load"]
        return found

    assert await load() == 0
    llm.gate = asyncio.Event()
    tasks = [asyncio.create_task(client.post(CHAT_PATH, json=CHAT)) for _ in range(3)]
    await until(lambda: len(llm.calls) == 3)
    assert await load() == 3
    llm.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
    assert await load() == 0


async def test_models_have_a_root_and_a_parent(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.adapters.known["mine"] = LoRAAdapter("mine", "adapters/mine")
    base, mine = (await client.get("/v1/models")).json()["data"]
    assert (base["root"], base["parent"], base["max_model_len"]) == ("embedded", None, 4096)
    assert (mine["root"], mine["parent"], mine["max_model_len"]) == ("adapters/mine", "org/fake-model", 4096)
    assert (await client.get("/v1/models/mine")).json() == mine


async def test_metrics_tell_of_the_build_and_the_process(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["raylm:build_info"].labels["version"] == VERSION
    assert samples["raylm:build_info"].value == 1
    assert 0.5 < samples["process_resident_memory_bytes"].value / resident_bytes() < 2
    assert samples["process_cpu_seconds_total"].value > 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Page(HTMLParser):
    """The addresses that a page loads, its ids and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]


async def test_docs_is_a_page_of_this_server_alone(client: httpx.AsyncClient) -> None:
    answer = await client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    page = Page()
    page.feed(answer.text)
    assert page.loads == ["openapi.json"]
    assert "://" not in answer.text
    assert set(re.findall(r'getElementById\("(\w+)"\)', answer.text)) <= set(page.ids)
    assert "innerHTML" not in answer.text, "a server's text must never become HTML"


async def test_docs_needs_no_key_and_what_it_asks_for_does(llm: FakeAsyncLLM, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine: sk-1\n")
    config = Config.model_validate({"ingress": {"api_keys_file": str(keys)}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        for path in ("/docs", "/ping"):
            assert (await client.get(path)).status_code == 200
        for path in ("/openapi.json", "/load"):
            error_of(await client.get(path), 401)
            assert (await client.get(path, headers={"authorization": "Bearer sk-1"})).status_code == 200

"""Information for operators: the same readiness on all paths, counts of answers without probes, and the access log."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.stages import parse
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of, served, until
from tests.ingress.refused import error_of

READY_PATHS = ["/health", "/ready", "/v1/models", "/v1/models/org/fake-model"]


@pytest.mark.parametrize("path", READY_PATHS)
async def test_without_an_engine_nothing_is_ready(client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str) -> None:
    assert (await client.get(path)).status_code == 200
    llm.is_ready = False
    answer = await client.get(path)
    assert error_of(answer, 503)["code"] == "engine_unavailable"
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", READY_PATHS)
async def test_a_replica_that_drains_is_not_ready(client: httpx.AsyncClient, app: Starlette, path: str) -> None:
    await app.state.requests.drain(0)
    assert error_of(await client.get(path), 503)["code"] == "shutting_down"


async def test_probes_are_not_among_the_answers(app: Starlette, client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.is_ready = False
    for path in ("/health", "/ready"):
        error_of(await client.get(path), 503)
    llm.is_ready = True
    mounted = httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path="/llm"), base_url="http://test")
    assert (await mounted.get("/llm/health")).status_code == 200
    assert "raylm:http_answers_total{" not in (await client.get("/metrics")).text
    await client.get("/v1/models/health")
    counted = re.findall(r"raylm:http_answers_total\{.*status=\"(\d+)\"\} (\S+)", (await client.get("/metrics")).text)
    assert counted == [("200", "1.0"), ("404", "1.0")]  # the first request of /metrics, and a model without a name


def logged(llm: FakeAsyncLLM, access_log: bool = True) -> Starlette:
    config = Config.model_validate({"ingress": {"access_log": access_log}})
    return build_asgi_app(llm, config)  # type: ignore[arg-type]


def lines(text: str) -> list[list[str]]:
    found = [parse(line) for line in text.splitlines()]
    assert all(line is not None and line[:2] == ("stage", "access") for line in found)
    return [line[2].split() for line in found if line is not None]


async def test_the_access_log_has_a_line_for_each_answer_and_no_body(
    llm: FakeAsyncLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(logged(llm)) as client:
        await client.get("/health")
        await client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        await client.get("/no/such%0A%1B[31mroute?secret=1", headers={"x-forwarded-for": "1.2.3.4, ::1"})
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert "Say" not in printed
    (text, chat, missing) = lines(printed)
    assert text[:4] == ["127.0.0.1", "POST", "/v1/completions", "200"]
    assert float(text[4]) >= 0
    assert text[5:] == ["s", "mine"]
    assert chat[1:4] == ["POST", "/v1/chat/completions", "200"]
    assert missing[:4] == ["::1", "GET", "/no/such%0A%1B%5B31mroute", "404"]


async def test_a_client_that_leaves_has_a_line_without_a_status(
    llm: FakeAsyncLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.gate, llm.open_outputs = asyncio.Event(), 0
    printed: list[str] = []

    def has_line() -> bool:
        printed.append(capsys.readouterr().out)
        return "access" in "".join(printed)

    async with served(logged(llm)) as url, httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=TEXT, timeout=0.2)
        await until(has_line)
    ((_, method, path, status, *_),) = lines("".join(printed))
    assert [method, path, status] == ["POST", "/v1/completions", "-"]


async def test_without_the_switch_there_is_no_access_log(llm: FakeAsyncLLM, capsys: pytest.CaptureFixture[Any]) -> None:
    async with client_of(logged(llm, access_log=False)) as client:
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("replicas", "wanted"), [(3, "3.0"), ({"min": 0, "max": 4}, "0.0"), ({"min": 2, "max": 4}, "2.0")]
)
async def test_limits_stand_beside_what_they_bound(llm: FakeAsyncLLM, replicas: object, wanted: str) -> None:
    bounds = {"max_queued_requests": 7, "max_queued_tokens": 900}
    config = Config.model_validate({"ingress": bounds, "engine": {"replicas": replicas}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        told = dict(re.findall(r"^raylm:(\w+)\{.*\} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE))
    assert (told["queued_requests_limit"], told["queued_tokens_limit"]) == ("7.0", "900.0")
    assert told["engines_wanted"] == wanted

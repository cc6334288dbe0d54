"""The service level that engines get with a request: its key, and the targets in its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.messages import ServiceLevel
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of
from tests.ingress.refused import error_of


async def level_of(client: httpx.AsyncClient, llm: FakeAsyncLLM, body: dict[str, Any], **headers: str) -> ServiceLevel:
    answer = await client.post(
        "/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    assert answer.status_code == 200
    service: ServiceLevel = llm.calls[-1].head.service
    return service


async def test_without_keys_and_headers_nothing_is_said(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    assert await level_of(client, llm, TEXT) == ServiceLevel()


async def test_a_key_is_told_by_a_digest_of_its_name(tmp_path: Path) -> None:
    path, llm = tmp_path / "keys", FakeAsyncLLM()
    path.write_text("alice: sk-1\nbob: sk-2\n")
    config = Config.model_validate({"ingress": {"api_keys_file": str(path)}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        services = [await level_of(client, llm, TEXT, x_api_key=key) for key in ("sk-1", "sk-2", "sk-1")]
    alice, bob, again = (service.tenant for service in services)
    assert alice == again != bob
    assert len(alice) == 16
    assert "alice" not in alice


async def test_targets_and_time_limits(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    headers = {"x_raylm_ttft_ms": "250", "x_raylm_itl_ms": "40", "request_timeout_ms": "9000"}
    assert await level_of(client, llm, TEXT, **headers) == ServiceLevel(ttft_s=0.25, itl_s=0.04, timeout_s=9.0)
    assert (await level_of(client, llm, TEXT | {"stream": True}, **headers)).timeout_s is None, (
        "a stream begins at once"
    )
    assert await level_of(client, llm, TEXT) == ServiceLevel(), "only for that request"


async def test_a_keys_targets_are_those_of_its_requests_that_name_none(tmp_path: Path) -> None:
    path, llm = tmp_path / "keys", FakeAsyncLLM()
    path.write_text("alice: sk-1 ttft_ms=800 itl_ms=50.5\nbob: sk-2\n")
    config = Config.model_validate({"ingress": {"api_keys_file": str(path)}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        alice, bob = [await level_of(client, llm, TEXT, x_api_key=key) for key in ("sk-1", "sk-2")]
        urgent = await level_of(client, llm, TEXT, x_api_key="sk-1", x_raylm_ttft_ms="250")
    assert [(one.ttft_s, one.itl_s) for one in (alice, bob, urgent)] == [(0.8, 0.0505), (None, None), (0.25, 0.0505)]


@pytest.mark.parametrize("name", ["x-raylm-ttft-ms", "x-raylm-itl-ms"])
@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", ""])
async def test_a_target_that_is_none_is_refused(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, value: str, name: str
) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={name: value})
    assert error_of(answer, 400)["param"] == name
    assert not llm.calls


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_a_target_is_refused_where_nothing_is_scheduled_by_it(policy: str) -> None:
    llm = FakeAsyncLLM()
    config = Config.model_validate({"scheduler": {"policy": policy}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/completions", json=TEXT, headers={"x-raylm-ttft-ms": "100"})
    error = error_of(answer, 400)
    assert error["param"] == "x-raylm-ttft-ms"
    assert policy in error["message"]

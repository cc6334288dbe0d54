"""State that two ingress replicas of `raylm serve` share: key limits, metrics of both, and LoRA adapters."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from raylm.checkpoint import EMBEDDED
from raylm.frontend.state.messages import COUNTED_S
from tests.adapters import make_adapter
from tests.serving import ARGS, Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]

LIMITS = {
    "requests": "requests_per_minute=9",
    "tokens": "tokens_per_minute=1500",
    "places": "concurrency=7",
    "again": "requests_per_minute=9",
    "root": "admin",
}


def key(name: str) -> dict[str, str]:
    return {"x-api-key": f"sk-{name}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("state"), free_port()
    (folder / "keys").write_text("".join(f"{name}: sk-{name} {limits}\n" for name, limits in LIMITS.items()))
    make_adapter(EMBEDDED, folder / "adapters" / "one")
    args = ARGS | {
        "ingress": {"replicas": 2, "api_keys_file": str(folder / "keys")},
        "lora": {"root": str(folder / "adapters")},
    }
    with Server(serve_file(folder / "serve.yaml", port, args), port) as server:
        yield server


async def answers_of(server: Server, name: str, count: int, max_tokens: int) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        body = chat("Hi", max_tokens=max_tokens, ignore_eos=True)
        calls = [client.post("/v1/chat/completions", json=body, headers=key(name)) for _ in range(count)]
        return list(await asyncio.gather(*calls))


async def metrics_of(server: Server) -> str:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        return (await client.get("/metrics", headers=key("root"))).text


def counts(text: str) -> dict[str, float]:
    found = re.findall(r'^raylm:http_answers_total\{key="(\w+)",.*status="(\d+)"\} (\S+)$', text, re.M)
    return {f"{name} {status}": float(count) for name, status, count in found}


async def counted(server: Server) -> tuple[float, float]:
    """The numbers of answers with 200 and with 429 to the key "requests", as one replica reports them."""
    told = counts(await metrics_of(server))
    return told["requests 200"], told["requests 429"]


async def test_a_hundred_at_once_do_not_pass_the_requests_of_a_minute(server: Server) -> None:
    answers = await answers_of(server, "requests", 100, 4)
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [429] * 91
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"9"}
    assert all(0 < int(answer.headers["retry-after"]) <= COUNTED_S for answer in answers if answer.status_code == 429)


async def test_a_hundred_at_once_do_not_pass_the_tokens_of_a_minute(server: Server) -> None:
    answers = await answers_of(server, "tokens", 100, 64)
    served = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 1500 - 2 * max(served) < sum(served) <= 1500


async def test_a_hundred_at_once_do_not_pass_the_open_requests(server: Server) -> None:
    answers = await answers_of(server, "places", 100, 200)
    assert {answer.status_code for answer in answers} == {200, 429}
    at_once = [answer for answer in answers if answer.status_code == 200]
    assert len(at_once) >= 7, "a later request found a free place again"


async def test_metrics_of_both_replicas_are_told_by_each(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        for _ in range(20):
            assert (await client.get("/v1/models", headers=key("root"))).status_code == 200
    async with asyncio.timeout(300):
        while any(told != (9.0, 91.0) for told in [await counted(server) for _ in range(6)]):
            pass
    text = await metrics_of(server)
    assert len(set(re.findall(r'^raylm:engines_ready\{.*replica="(.+)"\}', text, re.M))) == 2
    assert len(re.findall(r"^vllm:num_requests_running\{", text, re.M)) == 1


async def test_limits_hold_when_the_state_is_killed(server: Server) -> None:
    before = await answers_of(server, "again", 8, 4)
    assert {answer.status_code for answer in before} == {200}
    server.kill_actor("StateActor")
    answers = await answers_of(server, "again", 20, 4)
    assert sorted(answer.status_code for answer in answers) == [200] + [429] * 19, "8 of 9 requests were used before"


async def test_a_state_that_gives_no_sign_of_life_is_replaced(server: Server) -> None:
    """Its process is stopped, as on a node without power. Ray does not notice it."""
    (stopped,) = server.processes("StateActor")
    server.kill_actor("StateActor", signal.SIGSTOP)
    statuses: list[int] = []
    async with asyncio.timeout(300):
        while 200 not in statuses:
            statuses += [answer.status_code for answer in await answers_of(server, "places", 1, 4)]
    assert set(statuses) <= {200, 503}
    assert set(server.processes("StateActor")) - {stopped}
    with suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGKILL)


def test_adapters_come_back_when_all_start_anew(server: Server) -> None:
    body = {"lora_name": "one", "lora_path": "one"}
    refused = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=key("places"), timeout=300)
    assert refused.status_code == 403
    loaded = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=key("root"), timeout=300)
    assert loaded.status_code == 200, loaded.text
    for name in ("ServeReplica:default:Ingress", "ServeReplica:default:Engine", "EngineCore"):
        for pid in server.processes(name):
            with suppress(ProcessLookupError):  # it ended together with one before it
                os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json=chat("Hi", max_tokens=2) | {"model": "one"},
                headers=key("root"),
                timeout=300,
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    server.wait_until(is_back, "does not serve the adapter again")

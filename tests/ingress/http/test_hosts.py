"""The Host headers to which a server answers."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.ingress import Surroundings, build_asgi_app
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT

KNOWN = [
    "localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000",
    "[::1]", "10.0.0.5:8000", socket.gethostname(), f"{socket.gethostname()}.local:8000",
]  # fmt: skip
UNKNOWN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "[::1]x",
    "",
]


def client_of(ingress: dict[str, Any] | None = None, *, on_loopback: bool = True) -> httpx.AsyncClient:
    config = Config.model_validate({"ingress": ingress or {}})
    app = build_asgi_app(FakeAsyncLLM(), config, surroundings=Surroundings(on_loopback=on_loopback))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def statuses(client: httpx.AsyncClient, host: str) -> set[int]:
    headers = {"host": host}
    inference = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    return {inference.status_code, (await client.get("/metrics", headers=headers)).status_code}


@pytest.mark.parametrize("host", KNOWN)
async def test_a_server_on_loopback_answers_its_own_names(host: str) -> None:
    async with client_of() as client:
        assert await statuses(client, host) == {200}


@pytest.mark.parametrize("host", UNKNOWN)
async def test_a_server_on_loopback_refuses_other_names_except_for_probes(host: str) -> None:
    async with client_of() as client:
        assert await statuses(client, host) == {403}
        refused = (await client.get("/v1/models", headers={"host": host})).json()["error"]
        assert refused["code"] == "permission_denied"
        assert "ingress.allowed_hosts" in refused["message"]
        assert (await client.get("/health", headers={"host": host})).status_code == 200


async def test_a_knob_allows_more_names() -> None:
    async with client_of({"allowed_hosts": ["LLM.example.com"]}) as client:
        assert await statuses(client, "llm.example.com:443") == {200}
        assert await statuses(client, "localhost") == {200}
        assert await statuses(client, "evil.example") == {403}
    async with client_of({"allowed_hosts": ["*"]}) as client:
        assert await statuses(client, "evil.example") == {200}


async def test_a_server_on_other_addresses_answers_every_name_unless_some_are_set() -> None:
    async with client_of(on_loopback=False) as client:
        assert await statuses(client, "llm.example.com") == {200}
    async with client_of({"allowed_hosts": ["llm.example.com"]}, on_loopback=False) as client:
        assert await statuses(client, "evil.example") == {403}


@pytest.mark.parametrize(
    ("client", "forwarded", "status"),
    [
        ("127.0.0.1", None, 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("10.0.0.2", "127.0.0.1", 200),  # the HAProxy of a node, with a client on that node
        ("10.0.0.2", "9.9.9.9, ::1", 200),
        ("10.0.0.2", "10.0.0.3", 403),
        ("10.0.0.2", "127.0.0.1, 9.9.9.9", 403),
        ("10.0.0.2", None, 403),
        ("10.0.0.9", "127.0.0.1", 403),  # not a node, so its header is not trusted
        ("127.0.0.1", "10.0.0.2", 403),
    ],
)
async def test_localhost_is_answered_alike_by_the_replicas_of_all_nodes(
    client: str, forwarded: str | None, status: int
) -> None:
    around = Surroundings(nodes=lambda: {"10.0.0.1", "10.0.0.2"})
    app = build_asgi_app(FakeAsyncLLM(), Config(), surroundings=around)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, client=(client, 9))
    headers = {"x-forwarded-for": forwarded} if forwarded else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as api:
        for path in ("/v1/requests", "/v1/cluster"):
            assert (await api.get(path, headers=headers)).status_code == status


async def test_a_server_with_keys_needs_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-a")
    async with client_of({"api_keys_env": "KEYS"}) as client:
        client.headers["authorization"] = "Bearer sk-a"
        assert await statuses(client, "llm.example.com") == {200}

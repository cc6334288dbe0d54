"""Requests that hold places without need or contradict themselves, on a running server beside honest streams."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.hostile.conftest import Beside
from tests.serving import Server, chat

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
)
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]},
    "repetition_penalty": {"repetition_penalty": 1e-300},
}


# Serve's own headers, and headers that it decodes as UTF-8.
HEADERS = [
    ("x-request-disconnect-disabled", b"?1"), ("x-request-timeout-seconds", b"0.001"), ("x-request-id", b"\xff"),
    ("serve_multiplexed_model_id", b"\xff"), ("x-session-id", b"\xff"), ("traceparent", b"\xff"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HEADERS)
async def test_no_header_changes_how_a_request_is_served(
    client: httpx.AsyncClient, beside: Beside[Any], name: str, value: bytes
) -> None:
    body = chat("Hi", max_tokens=8)
    wanted = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    send = (client.post("/v1/chat/completions", json=body, headers={name: value}) for _ in range(20))
    for answer in await beside(asyncio.gather(*send)):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == wanted


async def test_silent_bodies_hold_no_places(server: Server, client: httpx.AsyncClient, beside: Beside[None]) -> None:
    async def hostile() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        try:
            for _, writer in connections:
                writer.write(HEAD)
            answer = await client.post("/v1/chat/completions", json=chat("Hi", max_tokens=4))
            assert answer.status_code == 200, answer.text
            metrics = (await client.get("/metrics")).text
            queued = [line for line in metrics.splitlines() if line.startswith("raylm:queued_requests{")]
            assert float(queued[0].rsplit(" ", 1)[1]) < 50
        finally:
            for _, writer in connections:
                writer.close()

    await beside(hostile())


@pytest.mark.parametrize("field", CONTRADICTIONS)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_contradiction_is_told_by_name(
    client: httpx.AsyncClient, beside: Beside[Any], field: str, logprobs: bool
) -> None:
    """No token can be drawn, so there are no log-probabilities to report either."""
    body = chat("Hi", max_tokens=20, logprobs=logprobs) | CONTRADICTIONS[field]
    answer = await beside(client.post("/v1/chat/completions", json=body))
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]

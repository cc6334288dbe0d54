"""A WebSocket upgrade is refused like a request, without an internal error."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette

from raylm.config import Config
from raylm.ingress import build_asgi_app
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import served
from tests.serving import websocket_upgrade


@pytest.fixture(params=[False, True], ids=["open", "with keys"])
def app(request: pytest.FixtureRequest, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    monkeypatch.setenv("KEYS", "sk-1")
    config = {"ingress": {"api_keys_env": "KEYS"}} if request.param else {}
    return build_asgi_app(llm, Config.model_validate(config))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/chat/completions", "/health", "/nowhere"])
async def test_an_upgrade_is_answered_404_in_the_envelope(
    app: Starlette, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(app, websockets=True) as url:
        head, _, body = (await asyncio.to_thread(websocket_upgrade, int(url.rpartition(":")[2]), path)).partition(
            b"\r\n\r\n"
        )
    assert head.startswith(b"HTTP/1.1 404 ")
    assert "WebSockets" in orjson.loads(body)["error"]["message"]
    assert not caplog.records


async def test_a_server_without_the_extension_gets_a_close(app: Starlette) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]

"""Probes are answered in front of Serve's handling, and a crowd of connections is accepted in a few turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from raylm.ingress.http.entrance import Entrance, HeadersMiddleware, ProbeMiddleware
from raylm.ingress.http.listener import PER_TURN, CrowdServer

CROWD = 300


async def serves(scope: Scope, receive: Receive, send: Send) -> None:
    """What stands for Serve's handling: it says what it was asked."""
    await PlainTextResponse(f"Serve: {scope['root_path']} {scope['path']}", 202)(scope, receive, send)


def client(entrance: Entrance, root_path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(ProbeMiddleware(serves, entrance), root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize(("root_path", "prefix"), [("", "/"), ("", "/models/a"), ("/up", "/"), ("/up", "/models/a")])
async def test_a_probe_is_answered_by_the_app_wherever_it_is_mounted(
    app: Starlette, root_path: str, prefix: str
) -> None:
    entrance = Entrance()
    entrance.open(app, lambda: prefix)
    at = root_path + prefix.rstrip("/")
    async with client(entrance, root_path) as asking:
        for path in ("/health", "/ready", "/ping"):
            answer = await asking.get(at + path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            assert "x-request-id" in answer.headers
        app.state.requests.shutting_down = True
        assert (await asking.get(f"{at}/health")).status_code == 503


@pytest.mark.parametrize(
    "path", ["/other/health", "/models/health", "/models/a/v1/models", "/models/a/health/", "/health"]
)
async def test_what_is_no_probe_of_the_app_passes_as_it_is(app: Starlette, path: str) -> None:
    entrance = Entrance()
    entrance.open(app, lambda: "/models/a")
    async with client(entrance, "/up") as asking:
        assert (await asking.get(f"/up{path}")).text == f"Serve: /up /up{path}"


async def test_a_proxy_without_an_app_lets_probes_pass() -> None:
    async with client(Entrance()) as asking:
        assert (await asking.get("/health")).text == "Serve:  /health"


KEPT = [(b"x-api-key", b"\xff"), (b"x-request-id", "é".encode()), (b"content-type", b"application/json")]
UNREADABLE = [
    (b"x-request-id", b"\xff"), (b"serve_multiplexed_model_id", b"\xff"), (b"serve-multiplexed_model-id", b"\xff"),
    (b"x-session-id", b"\xff"), (b"traceparent", b"\xff"), (b"x-request-timeout-seconds", b"\xff"),
]  # fmt: skip
STEERING = [(b"x-request-timeout-seconds", b"0.001"), (b"x-request-disconnect-disabled", b"?1")]


@pytest.mark.filterwarnings("ignore")  # Ray warns when its modules are imported
@pytest.mark.parametrize("in_replica", [True, False])
async def test_serve_gets_no_header_that_it_fails_on(app: Starlette, in_replica: bool) -> None:
    passed: list[Scope] = []

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    entrance = Entrance()
    if in_replica:
        entrance.open(app, str)
    sent = [*UNREADABLE, *STEERING, *KEPT]
    await HeadersMiddleware(handle, entrance)({"type": "http", "headers": sent}, None, None)  # type: ignore[arg-type]
    assert passed[0]["headers"] == (KEPT if in_replica else [*STEERING, *KEPT])


async def turns_to_accept(kind: type[uvicorn.Server]) -> int:
    """Turns of the event loop until a crowd that has connected before is accepted."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = kind(uvicorn.Config(serves, lifespan="off", log_config=None, backlog=CROWD, http="httptools"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listening])
    crowd = [socket.create_connection(listening.getsockname()) for _ in range(CROWD)]
    turns = 0
    while len(server.server_state.connections) < CROWD:
        await asyncio.sleep(0)
        turns += 1
    for connection in crowd:
        connection.close()
    await server.shutdown([listening])
    return turns


def test_a_crowd_is_accepted_in_a_few_turns() -> None:
    assert uvloop.run(turns_to_accept(CrowdServer)) <= CROWD // PER_TURN + 5


def served(kind: type[uvicorn.Server], ask: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = kind(uvicorn.Config(serves, lifespan="off", log_config=None, http="httptools"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110 - uvicorn's own flag
            await asyncio.sleep(0.01)
        address = listening.getsockname()
        await ask(f"http://127.0.0.1:{address[1]}")
        server.should_exit = True
        await serving
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    uvloop.run(main())


def test_it_serves_and_ends_as_uvicorns_own() -> None:
    async def ask(url: str) -> None:
        async with httpx.AsyncClient() as asking:
            answers = await asyncio.gather(*(asking.get(f"{url}/a") for _ in range(20)))
        assert {answer.text for answer in answers} == {"Serve:  /a"}

    served(CrowdServer, ask)


def test_it_goes_on_when_there_were_no_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.ingress.http.listener._PAUSE_S", 0.05)
    faults = [OSError(24, "Too many open files"), ConnectionAbortedError()]
    accept = socket.socket.accept

    def failing(sock: socket.socket) -> Any:
        if faults:
            raise faults.pop(0)
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)

    async def ask(url: str) -> None:
        async with httpx.AsyncClient() as asking:
            assert (await asking.get(f"{url}/a")).text == "Serve:  /a"

    served(CrowdServer, ask)
    assert not faults

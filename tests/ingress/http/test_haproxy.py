"""HAProxy as Ray configures and starts it, with what RayLM changes: its own answers, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import error_response
from tests.serving import free_port

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns when its modules are imported

BODY = b"x" * 400


class Replica:
    """A server that reads a request and notices when its client has gone: it never answers, or without an end."""

    def __init__(self) -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self.head = b""
        self.port = free_port()
        self.ready = (b"503 Service Unavailable", b'{"error":{}}')
        self.probes: list[bytes] = []  # but those that are HAProxy's own
        self.says_nothing = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/-/healthz" in (head := await reader.readuntil(b"\r\n\r\n")):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        elif b"GET" in head and head.split()[1].removeprefix(b"/up") in (b"/health", b"/ready", b"/ping"):
            if b"host: haproxy" not in head.lower():
                self.probes.append(head.split()[1])
            if self.says_nothing.is_set():
                await reader.read()
            status, body = self.ready
            writer.write(
                b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)
            )
        elif b"/endless" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            with suppress(ConnectionError):
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
            self.left.set()
        else:
            self.head = head
            await reader.readexactly(len(BODY))
            self.asked.set()
            with suppress(ConnectionResetError):
                await reader.read()
            self.left.set()
        writer.close()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica()
    async with await asyncio.start_server(replica.serve, "127.0.0.1", replica.port):
        yield replica


@pytest.fixture
async def haproxy(tmp_path: Path, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Ray's object that runs HAProxy: below /up a replica, below /down none."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    from raylm.ingress.http.haproxy import configure

    for name in ("_HEAD_S", "_READER_S"):
        monkeypatch.setattr(f"raylm.ingress.http.haproxy.{name}", 1)
    server = ServerConfig("replica", "127.0.0.1", replica.port)
    backends = {
        "up": BackendConfig("up", "/up", app_name="up", servers=[server], ingress_deployment_name="Ingress"),
        "down": BackendConfig("down", "/down", app_name="down", ingress_deployment_name="Ingress"),
        "other": BackendConfig("other", "/", app_name="other", servers=[server], ingress_deployment_name="Other"),
    }
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        metrics_enabled=False,
        metrics_port=free_port(),
        stats_port=free_port(),
    )
    api = HAProxyApi(config, backends, str(tmp_path / "haproxy.cfg"))
    configure(SimpleNamespace(_haproxy=api))
    await api.start()
    yield api
    await api.stop()


async def test_what_it_answers_itself_has_the_envelope_of_both_apis(haproxy: Any) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{haproxy.cfg.http_options.port}") as client:
        answer = await client.post("/down/v1/chat/completions", json={})
    ours = error_response(EngineUnavailableError(answer.json()["error"]["message"]), "/v1/completions")
    assert answer.json() == {"type": "error"} | json.loads(bytes(ours.body))
    assert answer.status_code == ours.status_code == 503
    for name in ("retry-after", "content-type"):
        assert answer.headers[name] == ours.headers[name]


@pytest.mark.parametrize("apart_s", [0, 0.1])
async def test_it_sees_a_client_hang_up_that_waits_for_an_answer(
    haproxy: Any, replica: Replica, apart_s: float
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", haproxy.cfg.http_options.port)
    writer.write(b"POST /up HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: forged\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    await asyncio.sleep(apart_s)
    writer.write(BODY)
    async with asyncio.timeout(10):
        await replica.asked.wait()
    assert replica.head.lower().rpartition(b"x-forwarded-for: ")[2].startswith(b"127.0.0.1\r\n")
    await asyncio.sleep(0.1 if apart_s else 1.2)
    assert not replica.left.is_set()
    writer.close()
    async with asyncio.timeout(1):
        await replica.left.wait()


async def test_it_passes_on_longer_heads_than_the_ingress_takes(haproxy: Any) -> None:
    from raylm.ingress.http.middleware import MAX_HEADER_BYTES

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{haproxy.cfg.http_options.port}") as client:
        answer = await client.get("/down", headers={"x-long": "x" * (MAX_HEADER_BYTES + 1)})
    assert answer.status_code == 503


@pytest.mark.parametrize("sent", [b"", b"POST /up HTTP/1.1\r\nHost: x\r\nContent-Length: 4"])
async def test_who_sends_no_whole_head_keeps_no_connection(haproxy: Any, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.cfg.http_options.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    finally:
        writer.close()


async def test_who_stops_to_read_holds_no_place(haproxy: Any, replica: Replica) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.cfg.http_options.port, limit=1000)
    writer.write(b"GET /up/endless HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    try:
        async with asyncio.timeout(20):
            await replica.left.wait()
    finally:
        writer.close()


class Probing:
    def __init__(self, haproxy: Any, replica: Replica) -> None:
        self._replica = replica
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{haproxy.cfg.http_options.port}", timeout=10)

    async def until(self, own: bool, path: str = "/up/health") -> httpx.Response:
        """The first answer that is HAProxy's own, or a replica's."""
        async with asyncio.timeout(10):
            while True:
                self._replica.probes.clear()
                answer = await self.client.get(path)
                if own == (not self._replica.probes):
                    return answer
                await asyncio.sleep(0.05)


@pytest.fixture
async def probing(haproxy: Any, replica: Replica) -> AsyncIterator[Probing]:
    probing = Probing(haproxy, replica)
    async with probing.client:
        yield probing


async def test_it_answers_probes_itself_while_a_replica_is_ready(probing: Probing, replica: Replica) -> None:
    await asyncio.sleep(1.5)  # it has asked by now
    assert (await probing.client.get("/up/health")).status_code == 503
    assert replica.probes == [b"/up/health"]
    replica.ready = b"200 OK", b'{"status":"ok"}'
    assert (await probing.until(own=True)).json() == {"status": "ok"}
    for path in ("/up/ready", "/up/ping"):
        await probing.until(own=True, path=path)
    replica.probes.clear()
    assert (await probing.client.head("/up/health")).status_code == 200
    assert replica.probes == []
    for path, headers in (("/health", {}), ("/up/health", {"origin": "https://page.example"})):
        assert (await probing.client.get(path, headers=headers)).status_code == 200
    assert replica.probes == [b"/health", b"/up/health"]


@pytest.mark.parametrize(
    "ready", [(b"503 Service Unavailable", b""), (b"401 Unauthorized", b'{"status":"ok"}'), (b"200 OK", b"fine")]
)
async def test_it_asks_the_replica_that_is_not_ready_any_more(
    probing: Probing, replica: Replica, ready: tuple[bytes, bytes]
) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    await probing.until(own=True)
    replica.ready = ready
    answer = await probing.until(own=False)
    assert (answer.status_code, answer.content) == (int(ready[0].split()[0]), ready[1])
    await asyncio.sleep(1.5)
    assert (await probing.client.get("/up/health")).content == ready[1]


async def test_a_replica_that_says_nothing_any_more_is_not_ready(probing: Probing, replica: Replica) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    await probing.until(own=True)
    replica.says_nothing.set()
    asked = False
    async with asyncio.timeout(10):
        while not asked:
            try:
                await probing.client.get("/up/health", timeout=1)
            except httpx.ReadTimeout:
                asked = True
    assert replica.probes == [b"/up/health"]

"""HAProxy as Ray configures and starts it, with RayLM's changes: its own answers, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from raylm.errors import ConfigError, EngineUnavailableError
from raylm.ingress.http.errors import error_response
from raylm.ingress.http.haproxy_limits import check_open_files, max_connections
from raylm.ingress.http.haproxy_start import explain_limit, explain_start, lacking_variables, own_directories
from raylm.serve_variables import SERVE_VARIABLES
from tests.serving import free_port

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[list[Connection]]]

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray's modules gives a warning

BODY = b"x" * 400
OWN = "RayLM's own"


class Replica:
    """A server that reads a request and notices when its client leaves. It never answers, or its answer never ends."""

    def __init__(self) -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self.head, self.begun = b"", asyncio.Event()
        self.port = free_port()
        self.ready = (b"503 Service Unavailable", b'{"error":{}}')
        self.probes: list[bytes] = []  # without HAProxy's own
        self.says_nothing = asyncio.Event()
        self._told = asyncio.Condition()
        self._times_told = 0

    async def told_haproxy(self, times: int = 2) -> None:
        """Wait until HAProxy has asked ``times`` more times whether the replica is ready, and has the answers."""
        until = self._times_told + times + 1  # it asks one at a time, so at a new question it has the last answer
        async with asyncio.timeout(300), self._told:
            await self._told.wait_for(lambda: self._times_told >= until)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/-/healthz" in (head := await reader.readuntil(b"\r\n\r\n")):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        elif b"GET" in head and head.split()[1].removeprefix(b"/up") in (b"/health", b"/ready", b"/ping"):
            if b"host: haproxy" not in head.lower():
                self.probes.append(head.split()[1])
            else:
                async with self._told:
                    self._times_told += 1
                    self._told.notify_all()
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
            self.begun.set()
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
async def haproxy(
    tmp_path: Path, replica: Replica, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Any]:
    """Ray's object that runs HAProxy, with a replica behind /up and none behind /down.

    The parameter has its environment variables, limits other than a second, and its HOST if that is not 127.0.0.1. OWN
    stands for RayLM's limit.
    """
    from ray.serve._private import haproxy as of_ray
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    from raylm.ingress.http.haproxy import configure

    monkeypatch.setattr(of_ray, "HAPROXY_CONFIG_TEMPLATE", of_ray.HAPROXY_CONFIG_TEMPLATE)  # for the undo
    given = getattr(request, "param", {})
    for name in ("_HEAD_S", "_READER_S", "_KEPT_S"):
        if given.get(name) is not OWN:
            monkeypatch.setattr(f"raylm.ingress.http.haproxy.{name}", given.get(name, 1))
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    server = ServerConfig("replica", "127.0.0.1", replica.port)
    backends = {
        "up": BackendConfig("up", "/up", app_name="up", servers=[server], ingress_deployment_name="Ingress"),
        "down": BackendConfig("down", "/down", app_name="down", ingress_deployment_name="Ingress"),
        "other": BackendConfig("other", "/", app_name="other", servers=[server], ingress_deployment_name="Other"),
    }
    config = HAProxyConfig(
        http_options=HTTPOptions(host=given.get("HOST", "127.0.0.1"), port=free_port(), keep_alive_timeout_s=90),
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


@pytest.mark.parametrize("haproxy", [{"HOST": "::"}], indirect=True)
async def test_it_listens_on_all_addresses_of_both_families(haproxy: Any) -> None:
    for host in ("127.0.0.1", "[::1]"):
        async with httpx.AsyncClient(base_url=f"http://{host}:{haproxy.cfg.http_options.port}") as client:
            assert (await client.get("/down")).status_code == 503


@pytest.mark.parametrize("apart", [False, True])
async def test_a_client_that_waits_for_an_answer_keeps_its_connection(
    haproxy: Any, replica: Replica, apart: bool
) -> None:
    """It outlives connections whose limits began later."""
    port = haproxy.cfg.http_options.port
    writer = await ask(port, replica, apart)
    later, idle = await asyncio.open_connection("127.0.0.1", port)
    idle.write(b"GET /up/health HTTP/1.1\r\n")
    async with asyncio.timeout(300):
        assert (await later.read()).startswith(b"HTTP/1.1 408 ")
    idle.close()
    assert not replica.left.is_set()
    writer.close()


@pytest.mark.parametrize("haproxy", [{"_READER_S": 3600}], indirect=True)
@pytest.mark.parametrize("apart", [False, True])
async def test_it_sees_a_client_hang_up_that_waits_for_an_answer(haproxy: Any, replica: Replica, apart: bool) -> None:
    """All limits for a client that has sent its request are an hour, so none of them ends the connection."""
    writer = await ask(haproxy.cfg.http_options.port, replica, apart)
    assert replica.head.lower().rpartition(b"x-forwarded-for: ")[2].startswith(b"127.0.0.1\r\n")
    writer.close()
    async with asyncio.timeout(300):
        await replica.left.wait()


@pytest.mark.long
@pytest.mark.parametrize("haproxy", [{"_KEPT_S": OWN}], indirect=True)
async def test_a_connection_stays_open_for_as_long_as_aiohttp_uses_it_again(haproxy: Any) -> None:
    """An answer, 15 s without a request, and an answer on the same connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.cfg.http_options.port)
    for pause_s in (15.5, 0):
        writer.write(b"GET /up/health HTTP/1.1\r\nHost: raylm\r\n\r\n")
        assert b" 503 " in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(b'{"error":{}}'))
        await asyncio.sleep(pause_s)
    writer.close()


async def test_a_replica_that_goes_without_a_word_is_noticed_by_tcp(haproxy: Any, replica: Replica) -> None:
    """No other limit ends a stream from a node without power. In /proc/net/tcp, timer 2 is a keep-alive timer."""
    writer = await ask(haproxy.cfg.http_options.port, replica, apart=False)

    def waits() -> list[float]:
        """Seconds to the next keep-alive of each connection from HAProxy to the replica that has a keep-alive timer."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        open_ = [row[5].split(":") for row in rows if row[3] == "01" and row[2].endswith(f":{replica.port:04X}")]
        return [int(ticks, 16) / os.sysconf("SC_CLK_TCK") for kind, ticks in open_ if kind == "02"]

    async with asyncio.timeout(100):
        while not (found := waits()):  # noqa: ASYNC110 - in /proc
            await asyncio.sleep(0.01)
    assert max(found) <= 5
    writer.close()


async def test_a_replica_that_acknowledges_nothing_is_noticed_by_tcp(haproxy: Any) -> None:
    """tests/nodes/test_shared_state.py tests it with open connections to a node without power."""
    lines = [line.split() for line in _config(haproxy).splitlines()]
    replicas = [line for line in lines if line[:2] == ["server", "replica"] and "check" in line]
    assert [line[line.index("tcp-ut") + 1] for line in replicas] == ["11s"] * 2


def _config(haproxy: Any) -> str:
    return Path(haproxy.config_file_path).read_text()


async def ask(port: int, replica: Replica, apart: bool) -> asyncio.StreamWriter:
    """Send a request, with its body ``apart`` from its head, and wait until the replica has all of it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /up HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: forged\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    async with asyncio.timeout(300):
        if apart:
            await replica.begun.wait()
        writer.write(BODY)
        await replica.asked.wait()
    return writer


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
        async with asyncio.timeout(300):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    finally:
        writer.close()


async def test_who_stops_to_read_holds_no_place(haproxy: Any, replica: Replica) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.cfg.http_options.port, limit=1000)
    writer.write(b"GET /up/endless HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    try:
        async with asyncio.timeout(300):
            await replica.left.wait()
    finally:
        writer.close()


class Probing:
    def __init__(self, haproxy: Any, replica: Replica) -> None:
        self._replica = replica
        # A new connection for each request: HAProxy closes one that is idle for a second, as here on a busy machine.
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{haproxy.cfg.http_options.port}"
        self.client = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)

    async def until(self, own: bool, path: str = "/up/health") -> httpx.Response:
        """The first answer that comes from HAProxy itself (``own``), or else from a replica."""
        async with asyncio.timeout(300):
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
    await replica.told_haproxy()
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
    await replica.told_haproxy()
    assert (await probing.client.get("/up/health")).content == ready[1]


async def test_a_replica_that_says_nothing_any_more_is_not_ready(probing: Probing, replica: Replica) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    await probing.until(own=True)
    replica.says_nothing.set()
    asked = False
    async with asyncio.timeout(300):
        while not asked:
            try:
                await probing.client.get("/up/health", timeout=1)
            except httpx.ReadTimeout:
                asked = True
    assert replica.probes == [b"/up/health"]


HEALTH = b"GET /up/health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def connect(haproxy: Any) -> AsyncIterator[Connect]:
    """Opens connections, and closes them at the end. Connections that are reset while they open are left out."""
    opened: list[Connection] = []

    async def connect(number: int, sent: bytes = b"", source: str = "127.0.0.1") -> list[Connection]:
        before = len(opened)
        for _ in range(number):
            with suppress(ConnectionResetError):
                port = haproxy.cfg.http_options.port
                opened.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))
                opened[-1][1].write(sent)
        return opened[before:]

    yield connect
    for _, writer in opened:
        writer.close()


async def ended(connection: Connection) -> bool:
    """Wait until HAProxy closes the connection. A test that waits too long fails by its own limit."""
    with suppress(ConnectionResetError):
        while await connection[0].read(65536):
            pass
    return True


async def test_a_connection_is_closed_after_an_answer_that_no_request_follows(
    connect: Connect, replica: Replica
) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    (connection,) = await connect(1, HEALTH)
    async with asyncio.timeout(300):  # Serve's own limit is 90 s
        assert (await connection[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
        assert await ended(connection)


BOUNDED = {"RAY_SERVE_HAPROXY_MAXCONN": 40, "RAYLM_HAPROXY_CONNECTIONS_PER_ADDRESS": 20}


@pytest.mark.parametrize("haproxy", [BOUNDED], indirect=True)
@pytest.mark.parametrize("sent", [b"", HEALTH[:-2], HEALTH], ids=["silent", "half a head", "kept alive"])
async def test_idle_connections_of_one_address_leave_places_for_others(
    haproxy: Any, connect: Connect, replica: Replica, sent: bytes
) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    idle = await connect(60, sent)
    headers = {"host": "x", "connection": "close"}
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{haproxy.cfg.http_options.port}", transport=transport
    ) as client:
        assert (await client.get("/up/health", headers=headers)).status_code == 200
        async with asyncio.timeout(300):  # 40 of the 60 were refused, the others are closed after a second
            assert all([await ended(connection) for connection in idle])
        assert (await client.get("/up/health", headers=headers)).status_code == 200


PATIENT = {"RAY_SERVE_HAPROXY_MAXCONN": 40, "_HEAD_S": 600, "_KEPT_S": 600}


@pytest.mark.parametrize("haproxy", [PATIENT], indirect=True)
async def test_the_last_places_are_for_addresses_with_few_connections(
    haproxy: Any, connect: Connect, replica: Replica
) -> None:
    replica.ready = b"200 OK", b'{"status":"ok"}'
    for source in ("127.0.0.2", "127.0.0.3"):
        assert len(await connect(15, b"G", source)) == 15  # 30 of 40 places are for all addresses
    few = await connect(8, HEALTH, "127.0.0.4")
    async with asyncio.timeout(300):
        assert [(await reader.readuntil(b" 200 "))[:9] for reader, _ in few] == [b"HTTP/1.1 "] * 8
        assert [await refused(connection) for connection in await connect(8, HEALTH, "127.0.0.4")].count(False) == 0


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files, and HAProxy's, to the system's maximum."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.long
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("haproxy", [{"_HEAD_S": 600, "_KEPT_S": 600}], indirect=True)
@pytest.mark.parametrize("sent", [b"", HEALTH[:-2], HEALTH], ids=["silent", "half a head", "kept alive"])
async def test_ten_thousand_idle_connections_of_one_address_keep_nobody_out(
    haproxy: Any, connect: Connect, replica: Replica, sent: bytes
) -> None:
    """No connection ends in the meantime. Prints the slowest answer to a probe from another address."""
    replica.ready, headers = (b"200 OK", b'{"status":"ok"}'), {"host": "x", "connection": "close"}
    all_there, seconds = asyncio.Event(), []
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    url = f"http://127.0.0.1:{haproxy.cfg.http_options.port}/up/health"

    async def probe() -> None:
        async with httpx.AsyncClient(transport=transport, timeout=300) as client:
            while not (is_last := all_there.is_set()) or len(seconds) < 10:
                begun = time.monotonic()
                assert (await client.get(url, headers=headers)).status_code == 200
                seconds.append(time.monotonic() - begun)
                await asyncio.sleep(0 if is_last else 0.1)

    async with asyncio.TaskGroup() as group:
        group.create_task(probe())
        for _ in range(100):
            await connect(100, sent)
            await asyncio.sleep(0)
        all_there.set()
    assert len(await connect(1, HEALTH, "127.0.0.3")) == 1
    print(f"{len(seconds)} probes, the slowest took {1e3 * max(seconds):.0f} ms")


async def refused(connection: Connection) -> bool:
    """Whether the connection ends without an answer."""
    try:
        return not await connection[0].read(64)
    except ConnectionResetError:
        return True


async def test_statistics_and_metrics_are_nowhere(haproxy: Any) -> None:
    for port in (haproxy.cfg.stats_port, haproxy.cfg.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("haproxy", [{"RAYLM_HAPROXY_MONITOR_HOST": "127.0.0.2"}], indirect=True)
async def test_statistics_and_metrics_listen_where_they_are_asked_to(haproxy: Any) -> None:
    async with httpx.AsyncClient() as client:
        for path in (f"{haproxy.cfg.stats_port}/stats", f"{haproxy.cfg.metrics_port}/metrics"):
            assert (await client.get(f"http://127.0.0.2:{path}")).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{path}")


async def test_its_admin_socket_is_its_users_alone(haproxy: Any) -> None:
    assert stat.S_IMODE(os.stat(haproxy.cfg.socket_path).st_mode) == 0o600


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of HAProxy's files."""
    from ray.serve._private import constants

    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_FILE"):
        monkeypatch.setattr(constants, f"RAY_SERVE_HAPROXY_{name}", str(tmp_path / "files" / name))
    return tmp_path / "files"


def test_the_directories_of_its_files_are_made_for_this_user_alone(files: Path) -> None:
    own_directories("node")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (files, files / "node")] == [0o700, 0o700]
    files.chmod(0o755)  # the mode that Serve gives it
    (files / "node").chmod(0o755)
    own_directories("node")
    assert stat.S_IMODE((files / "node").stat().st_mode) == 0o700


def refusal(node: str = "node") -> str:
    with pytest.raises(ConfigError) as caught:
        own_directories(node)
    return caught.value.message


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_can_write_to_is_refused(files: Path, mode: int) -> None:
    files.mkdir()
    files.chmod(mode)
    said = refusal()
    assert said.startswith(f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {files} can be written to by other users")
    assert "set RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, RAY_SERVE_HAPROXY_SOCKET_PATH" in said


def test_a_directory_above_that_others_can_write_to_is_refused_but_a_sticky_one(files: Path) -> None:
    files.parent.chmod(0o1777)
    own_directories("node")
    files.parent.chmod(0o777)
    assert refusal().startswith(f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {files.parent} can be written to by other users")
    files.parent.chmod(0o700)


def test_a_link_is_refused(files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    files.symlink_to(tmp_path / "elsewhere")
    assert "belongs to another user" in refusal() or "can be written to" in refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(files: Path) -> None:
    files.mkdir(mode=0o755)
    os.chown(files, 12345, 12345)
    assert refusal().startswith(f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {files} belongs to another user")
    os.chown(files, 0, 0)
    (files / "node").mkdir(mode=0o755)
    os.chown(files / "node", 12345, 12345)
    assert refusal().startswith(f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {files / 'node'} belongs to another user")


async def test_a_port_that_is_taken_is_said_with_what_moves_it(haproxy: Any, tmp_path: Path) -> None:
    from ray.serve._private.haproxy import HAProxyApi

    second = HAProxyApi(haproxy.cfg, {}, str(tmp_path / "second" / "haproxy.cfg"))
    haproxy.cfg.socket_path = str(tmp_path / "second.sock")
    with pytest.raises(RuntimeError) as caught:
        await second.start()
    port = haproxy.cfg.http_options.port
    said = explain_start(caught.value, port)
    assert said == f"HAProxy cannot listen at 127.0.0.1:{port}: Address already in use; http_options.port moves it."
    other = explain_start(caught.value, port + 1)
    assert other is not None
    assert other.endswith("RAY_SERVE_HAPROXY_METRICS_PORT or RAY_SERVE_HAPROXY_STATS_PORT moves it.")
    assert explain_start(RuntimeError("it crashed"), port) is None


def test_it_takes_as_many_connections_as_it_may_have_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_MAXCONN", raising=False)
    for hard, expected in ((resource.RLIM_INFINITY, 16_384), (2**20, 16_384), (20_000, 7_795), (600, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (1024, hard))
        assert max_connections() == expected
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "77")
    assert max_connections() == 77
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "many")
    with pytest.raises(ConfigError, match=r"^RAY_SERVE_HAPROXY_MAXCONN: 'many' is not a number of connections"):
        max_connections()


def test_too_few_open_files_are_refused_with_the_needed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_MAXCONN", raising=False)
    hard = 674
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, hard))
    check_open_files()
    hard = 673
    with pytest.raises(ConfigError) as refused:
        check_open_files()
    assert refused.value.message == (
        "ulimit -n: the hard limit of open files is 673, and HAProxy needs 674 for 256 connections; raise it."
    )
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "1000")
    with pytest.raises(ConfigError, match="2534 for 1000 connections; raise it, or lower RAY_SERVE_HAPROXY_MAXCONN"):
        check_open_files()
    hard = resource.RLIM_INFINITY
    check_open_files()


@pytest.mark.parametrize("haproxy", [{"RAY_SERVE_HAPROXY_MAXCONN": 20}], indirect=True)
async def test_what_haproxy_says_of_open_files_is_explained(haproxy: Any, tmp_path: Path) -> None:
    from ray.serve._private.haproxy import HAProxyApi

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    haproxy.cfg.maxconn, haproxy.cfg.socket_path = hard, str(tmp_path / "second.sock")
    second = HAProxyApi(haproxy.cfg, {}, str(tmp_path / "second" / "haproxy.cfg"))
    with pytest.raises(RuntimeError) as caught:
        await second.start()
    said = explain_limit(caught.value)
    assert said is not None
    assert said.endswith(f" open files, and the hard limit (ulimit -Hn) is {hard}; raise it.")
    assert explain_limit(RuntimeError("it crashed")) is None


def test_variables_that_a_file_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert lacking_variables() is None
    monkeypatch.delenv("RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH")
    said = lacking_variables()
    assert said is not None
    assert said.startswith("controller_options of the Serve file has no RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH: ")


def test_serves_controller_and_proxies_import_little() -> None:
    """They import these modules before serving. The knobs and the endpoints would take 0.1 s of a core each."""
    ask = (
        "import sys; from raylm.ingress import configure_controller, serve_middlewares; "
        "print(*(name for name in sys.modules if name.startswith('raylm.')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ask], capture_output=True, text=True, check=True)
    heavy = {"raylm.config", "raylm.messages", "raylm.frontend.request", "raylm.ingress.http.openapi"}
    assert heavy & set(done.stdout.split()) == set()

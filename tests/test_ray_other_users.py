"""Files, sockets and ports of a running server that another user of the machine can access without a key."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx
import pytest

from raylm.cli.serve_process import session_members
from raylm.cli.start_checks import keep_token_private
from tests.serving import ARGS, START_LIMIT_S, Server, free_port, serve_file

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

STRANGER = 54321
KEY = "sk-of-the-test-of-other-users"
KEYED = ARGS | {"ingress": {"api_keys_env": "RAYLM_API_KEY"}}
PREDICTABLE = (Path("/tmp/haproxy-serve"), Path("/tmp/ray"))
CALLS = (
    "/ray.rpc.InternalKVGcsService/InternalKVGet",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.serve.ASGIService/HandleRequest",
)


def as_stranger(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a child process with the rights of another user."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        result: Any = None
        with suppress(BaseException), os.fdopen(writing, "wb") as pipe:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            result = work()
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert data, "the other user's process failed"
    return pickle.loads(data)


@dataclass(frozen=True)
class Found:
    """Open files and Unix sockets of a server's processes, and their listening TCP ports by address."""

    paths: list[Path]
    sockets: list[Path]
    ports: list[tuple[str, int]]


def look(session: int) -> Found:
    inodes, paths = set[str](), set[Path]()
    for pid in session_members(session):
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
                elif target.startswith("/") and " (deleted)" not in target:
                    paths.add(Path(target))
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    sockets = {Path(line[7]) for line in unix if len(line) > 7 and line[6] in inodes and line[7].startswith("/")}
    ports = {
        (address(local), int(local.rpartition(":")[2], 16))
        for name in ("tcp", "tcp6")
        for _, local, _, state, *_, inode in (
            line.split()[:10] for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        )
        if state == "0A" and inode in inodes
    }
    return Found(sorted(paths), sorted(sockets), sorted(ports))


def address(field: str) -> str:
    """The IPv4 address in a field of /proc/net/tcp, or the mapped one in a field of /proc/net/tcp6."""
    digits = field.partition(":")[0][-8:]
    return socket.inet_ntoa(bytes.fromhex(digits)[::-1])


def writable_or_connectable(found: Found) -> list[str]:
    """The paths and sockets that the current user can write or connect to. Runs as the other user."""
    reached = [f"writes {path}" for path in found.paths if is_ordinary(path) and os.access(path, os.W_OK)]
    reached += [
        f"enters {path.parent}" for path in found.paths if is_ordinary(path) and os.access(path.parent, os.W_OK)
    ]
    for path in found.sockets:
        with socket.socket(socket.AF_UNIX) as one, suppress(OSError):
            one.connect(str(path))
            reached.append(f"connects to {path}")
    return reached


def is_ordinary(path: Path) -> bool:
    """Whether it is no directory, and not below /dev, /proc or /sys."""
    return not str(path).startswith(("/dev/", "/proc/", "/sys/")) and not os.path.isdir(path)


def readable(paths: list[Path]) -> list[str]:
    """The paths that the current user can read. Runs as the other user."""
    return [str(path) for path in paths if os.access(path, os.R_OK)]


def check(session: int, http_port: int, home: Path) -> None:
    """Check all files, sockets and ports.

    ``http_port`` is the server's; replicas and Serve's proxy have the same API.
    """
    found = look(session)
    assert found.sockets
    assert len(found.ports) > 5
    assert as_stranger(lambda: writable_or_connectable(found)) == []
    secrets = [Path(f"/proc/{pid}/environ") for pid in session_members(session)]
    secrets += [home / ".ray" / "auth_token", *(path for path in found.paths if ".sqlite" in path.name)]
    secrets += [path for path in found.paths if path.name == "haproxy.cfg"]
    assert any(".sqlite" in path.name for path in secrets)
    assert as_stranger(lambda: readable(secrets)) == []
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in session_members(session)]
    token = (home / ".ray" / "auth_token").read_text()
    assert not [one for one in words if KEY.encode() in one or token.encode() in one]
    assert ("127.0.0.1", http_port) in found.ports
    answers = {at: answer_of(*at) for at in found.ports}
    assert answers["127.0.0.1", http_port] == "the API, with a key"
    assert {answer for answer in answers.values() if answer is not None} <= {
        "the API, with a key", "metrics of Ray", "nothing without the token",
    }, answers  # fmt: skip


def answer_of(host: str, port: int) -> str | None:
    """The answer of a port to a caller without a key and without a token."""
    at = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    try:
        answer = httpx.get(f"http://{at}/v1/models", timeout=300)
    except httpx.HTTPError:
        return called(at)
    if answer.status_code == 401 and answer.text.startswith("{") and "No API key was given" in answer.text:
        assert httpx.get(f"http://{at}/metrics", timeout=300).status_code == 401
        return "the API, with a key"
    if answer.status_code in (401, 403):
        return "nothing without the token"
    if answer.status_code == 404 and all(
        httpx.get(f"http://{at}{path}", timeout=300).status_code in (401, 403, 404)
        for path in ("/", "/metrics", "/stats", "/api/version", "/nodes", "/api/serve/applications/")
    ):
        return "nothing without the token"
    if answer.status_code == 200 and re.match(r"# HELP \w+ ", answer.text):
        assert KEY not in answer.text
        return "metrics of Ray"
    return f"{answer.status_code} {answer.text[:200]}"


def called(at: str) -> str | None:
    """The answer of a gRPC port to such a caller. None if the port speaks neither HTTP nor gRPC."""
    codes = set()
    with grpc.insecure_channel(at) as channel:
        for name in CALLS:
            try:
                channel.unary_unary(name)(b"", timeout=300)
            except grpc.RpcError as error:
                codes.add(error.code())
            else:
                return f"answers {name}"
    known = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    return "nothing without the token" if codes <= known else f"{codes}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAYLM_API_KEY", KEY)
    tmp_path.chmod(0o755)
    for path in tmp_path.parents:
        if path != Path("/tmp") and Path("/tmp") in path.parents:
            path.chmod(0o755)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[None]:
    """Another user has created the directories with predictable names."""
    made = [path for path in PREDICTABLE if not path.exists()]
    for path in made:
        path.mkdir()
        path.chmod(0o777)
        os.chown(path, STRANGER, STRANGER)
    yield
    for path in made:
        shutil.rmtree(path)


@pytest.mark.usefixtures("taken")
def test_raylm_serve(home: Path) -> None:
    port = free_port()
    with Server(serve_file(home / "serve.yaml", port, KEYED), port, HOME=str(home)) as server:
        check(server._session, port, home)
        assert {host for host, _ in look(server._session).ports} == {"127.0.0.1"}
        assert [path for path in look(server._session).paths if set(PREDICTABLE) & {*path.parents}] == []


class ServeRun:
    """`serve run` of a file, with its own Ray, whose files are in a private directory."""

    def __init__(self, home: Path, port: int, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="own", dir="/tmp"))
        self.log = home / "run.log"
        self.environment = self._environment(home) | environment
        self.process = self._start(serve_file(home / "serve.yaml", port, KEYED))

    def _start(self, file: Path) -> subprocess.Popen[bytes]:
        """Start to serve ``file``. Returns the process that leads the session of all others."""
        return self._popen("serve", "run", str(file))

    def _popen(self, *command: str) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name(command[0]))
        with self.log.open("a") as log:
            return subprocess.Popen(
                [program, *command[1:]], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=self.environment,
            )  # fmt: skip

    def _environment(self, home: Path) -> dict[str, str]:
        names = {
            "CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock",
            "SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state",
        }  # fmt: skip
        files = {f"RAY_SERVE_HAPROXY_{name}": str(self.folder / "h" / file) for name, file in names.items()}
        own = {
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        return os.environ | {"XDG_STATE_HOME": str(home)} | own | files

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def said(self) -> str:
        """The output of all processes."""
        return self.log.read_text()

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(300)
        while members := session_members(self.process.pid):
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)


class ServeDeploy(ServeRun):
    """`serve deploy` of a file on a one-node cluster that `ray start` started.

    `ray start` opens its temporary directory to all users, so it is inside the private directory.
    """

    def _start(self, file: Path) -> subprocess.Popen[bytes]:
        dashboard = free_port()
        cluster = self._popen(
            "ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=8", f"--port={free_port()}",
            f"--dashboard-port={dashboard}", f"--ray-client-server-port={free_port()}", f"--temp-dir={self.folder}/ray",
        )  # fmt: skip
        deadline = time.monotonic() + START_LIMIT_S
        while self._popen("serve", "deploy", str(file), "-a", f"http://127.0.0.1:{dashboard}").wait():
            assert cluster.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(1)
        return cluster

    def said(self) -> str:
        logs = self.folder.glob("ray/session_*/logs/**/*")
        return "".join(path.read_text(errors="replace") for path in logs if path.is_file())


@pytest.fixture
def serve_run(home: Path) -> Iterator[Callable[..., ServeRun]]:
    yield from started(home, ServeRun)


@pytest.fixture
def serve_deploy(home: Path) -> Iterator[Callable[..., ServeRun]]:
    yield from started(home, ServeDeploy)


def started(home: Path, command: type[ServeRun]) -> Iterator[Callable[..., ServeRun]]:
    """A function that starts ``command``. All started processes end after the block."""
    keep_token_private()
    runs: list[ServeRun] = []

    def start(port: int, **environment: str) -> ServeRun:
        runs.append(command(home, port, **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_serve_run(home: Path, serve_run: Callable[..., ServeRun]) -> None:
    run = serve_run(port := free_port())
    run.wait_until(lambda: is_healthy(port))
    check(run.process.pid, port, home)
    assert stat.S_IMODE((run.folder / "h").stat().st_mode) == 0o700


@pytest.mark.usefixtures("taken")
def test_serve_deploy(home: Path, serve_deploy: Callable[..., ServeRun]) -> None:
    run = serve_deploy(port := free_port())
    run.wait_until(lambda: is_healthy(port))
    check(run.process.pid, port, home)
    assert stat.S_IMODE((run.folder / "h").stat().st_mode) == 0o700
    assert [path for path in look(run.process.pid).paths if set(PREDICTABLE) & {*path.parents}] == []


@pytest.mark.parametrize("command", ["serve_run", "serve_deploy"])
def test_serve_says_that_another_user_has_taken_haproxys_directory(
    home: Path, command: str, request: pytest.FixtureRequest
) -> None:
    start: Callable[..., ServeRun] = request.getfixturevalue(command)
    theirs = Path(tempfile.mkdtemp(prefix="own", dir="/tmp"))
    try:
        os.chown(theirs, STRANGER, STRANGER)
        run = start(free_port(), RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=str(theirs / "haproxy.cfg"))
        said = f"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC: {theirs} belongs to another user"
        run.wait_until(lambda: said in run.said())
        assert list(theirs.iterdir()) == []
    finally:
        shutil.rmtree(theirs)


def test_serve_run_says_which_port_is_taken(serve_run: Callable[..., ServeRun]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = f"HAProxy cannot listen at 127.0.0.1:{port}: Address already in use; http_options.port moves it."
        run = serve_run(port)
        run.wait_until(lambda: said in run.log.read_text())


def test_serve_run_says_that_the_port_of_serves_own_proxy_is_taken(serve_run: Callable[..., ServeRun]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = serve_run(free_port(), RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=str(port))
        said = f"Serve's own proxy cannot listen on port {port}, which is taken; RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"
        run.wait_until(lambda: said in run.log.read_text())

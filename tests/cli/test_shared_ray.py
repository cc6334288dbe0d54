"""`raylm serve` on a Ray that also serves another application, which answers before, during and after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.serving import ROOT, chat, free_port

pytestmark = [pytest.mark.ray, pytest.mark.long]

LIMIT_S = 300
HERE = Path(__file__).parent
QUESTION = chat("What is a KV cache?", max_tokens=40)


@dataclass
class Cluster:
    address: str
    port: int
    token: Path

    @property
    def environment(self) -> dict[str, str]:
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "RAY_ADDRESS": self.address}
        return os.environ | ours | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def theirs(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.port}/theirs", timeout=300).text

    def ours(self) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}/ours/v1/chat/completions", json=QUESTION, timeout=300)

    def command(self, *words: str) -> list[str]:
        place = ["--port", str(self.port), "--name", "ours", "--route-prefix", "/ours", "--num-blocks", "512"]
        return [sys.executable, "-m", "raylm.cli.main", "serve", "embedded", *place, *words]

    def kill_guards(self) -> None:
        listed = subprocess.run(["pgrep", "-f", "^ray::ApplicationGuard"], capture_output=True, text=True, check=True)
        ours = [pid for pid in listed.stdout.split() if str(self.token) in Path(f"/proc/{pid}/environ").read_text()]
        assert ours
        for pid in ours:
            os.kill(int(pid), signal.SIGKILL)

    def refusal(self, *words: str, **environment: str) -> str:
        """The only line on stderr of a start that fails."""
        environ = self.environment | environment
        done = subprocess.run(
            self.command(*words), env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert "Traceback" not in done.stdout
        return line


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port, token = free_port(), tmp_path_factory.mktemp("ray") / "token"
    token.write_text("0123456789abcdef" * 4)
    found = Cluster("", port, token)
    environ = {name: value for name, value in found.environment.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, str(HERE / "somebody_else.py"), str(port)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = (line.split() for line in process.stdout)
        found.address = next(words[1] for words in lines if words[:1] == ["address"])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found
        assert process.stdin is not None
        process.stdin.close()
        process.wait(300)


class Serving:
    """`raylm serve` on the cluster, while a thread sends requests to the other application continuously."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self._cluster = cluster
        self._log = log
        self._ended = threading.Event()
        self.their_answers: list[str] = []
        self._asker = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                self.their_answers.append(self._cluster.theirs())
            except httpx.HTTPError as error:
                self.their_answers.append(repr(error))
            time.sleep(0.1)

    def __enter__(self) -> Serving:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._cluster.command(), env=self._cluster.environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._asker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._asker.join()
        self.process.kill()
        self.process.wait()

    def written(self) -> str:
        return self._log.read_text()

    def wait(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{complaint}:\n{self.written()}"
            time.sleep(0.1)

    def wait_ready(self) -> None:
        self.wait(lambda: "  ready " in self.written() or self.process.poll() is not None, "is not ready")
        assert self.process.poll() is None, self.written()

    def child(self) -> int:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=True
        )
        (pid,) = map(int, listed.stdout.split())
        return pid


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_takes_away_only_ours(cluster: Cluster, tmp_path: Path, number: int) -> None:
    assert cluster.theirs() == "theirs"
    with Serving(cluster, tmp_path / "log") as serving:
        serving.wait_ready()
        assert "attention" in cluster.ours().json()["choices"][0]["message"]["content"]
        serving.process.send_signal(number)
        assert serving.process.wait(300) == 0
        assert cluster.ours().status_code == 404
        assert cluster.theirs() == "theirs"
    assert set(serving.their_answers) == {"theirs"}


@pytest.mark.long
def test_a_crash_takes_away_only_ours_and_the_next_start_waits_for_that(cluster: Cluster, tmp_path: Path) -> None:
    with Serving(cluster, tmp_path / "log") as crashed:
        crashed.wait_ready()
        assert cluster.ours().status_code == 200
        os.kill(crashed.child(), signal.SIGKILL)
        assert crashed.process.wait(300) == 1
        with Serving(cluster, tmp_path / "again") as serving:
            serving.wait_ready()
            assert cluster.ours().status_code == 200
            cluster.kill_guards()  # Ray starts them again
            os.kill(serving.child(), signal.SIGKILL)
            os.kill(serving.process.pid, signal.SIGKILL)
            serving.wait(lambda: cluster.ours().status_code == 404, "still serves after its crash")
    assert set(crashed.their_answers + serving.their_answers) == {"theirs"}


def test_another_port_or_a_taken_name_or_path_is_said(cluster: Cluster) -> None:
    assert f"http_options.port: Ray Serve already runs with {cluster.port}, not 1" in cluster.refusal("--port", "1")
    assert "name: an application 'theirs' already runs here" in cluster.refusal("--name", "theirs")
    assert "route_prefix: /theirs belongs to the application 'theirs'" in cluster.refusal("--route-prefix", "/theirs")
    assert cluster.theirs() == "theirs"


@pytest.mark.long
def test_a_wrong_token_is_said(cluster: Cluster) -> None:
    said = cluster.refusal(RAY_AUTH_TOKEN="f" * 64)
    assert f"cannot connect to Ray at {cluster.address}" in said
    assert "and the token: RAY_AUTH_MODE=token, RAY_AUTH_TOKEN" in said

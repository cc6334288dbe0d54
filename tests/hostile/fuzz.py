"""Random attacks on a server that this program starts, beside an honest client, for some minutes.

    python -m tests.hostile.fuzz [MINUTES]

A finding is an answer of 5xx except 503 with Retry-After, no answer to valid HTTP, a dead process, a changed text of
the honest client, or something left at the end. A finding is minimized, printed, and stored in ``found.jsonl``. Later
runs and test_found.py try the stored attacks first.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
from hypothesis import HealthCheck, Phase, given, settings

from tests.hostile.generators import Attack, attacks, http
from tests.serving import ARGS, Server, chat, free_port, serve_file

FOUND = Path(__file__).with_name("found.jsonl")
QUESTION = "What is 12 + 30?"
TIMEOUT_S = 60.0
QUIET_S = 8.0  # idle streams send a comment every 5 s; other connections may stay open
_GAUGES = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "raylm:queued_requests{")
_SLACK_FDS = 40
_SLACK_BYTES = 600 * 2**20


class FoundError(AssertionError):
    """A finding."""


def found_before() -> Iterator[Attack]:
    for line in FOUND.read_text().splitlines() if FOUND.exists() else ():
        yield Attack.of_json(json.loads(line))


def send(port: int, attack: Attack) -> bytes:
    """The answer, up to ``attack.read`` bytes or until the server is quiet."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        try:
            connection.sendall(attack.data)
            if _is_cut(attack.data):
                connection.shutdown(socket.SHUT_WR)
            while attack.read is None or len(got) < attack.read:
                piece = connection.recv(65536)
                if not piece:
                    break
                got += piece
                connection.settimeout(QUIET_S)
        except ConnectionError:
            pass  # the server may refuse a request before it is complete
        except TimeoutError:
            if not got:
                raise FoundError(f"no answer within {TIMEOUT_S:g} s") from None
    return got


def _is_cut(data: bytes) -> bool:
    """Whether the server must wait for more data."""
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?im)^content-length: *(\d+)\r?$", head)
    return not body or b"chunked" in head or not lengths or any(int(length) > len(body) for length in lengths)


def judge(attack: Attack, answer: bytes) -> int:
    """The status, or 0 without one. Raises FoundError for a wrong answer."""
    statuses = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    if statuses is None:
        if answer or (attack.read is None and not _is_cut(attack.data) and attack.data == _right(attack.data)):
            raise FoundError(f"it is answered {answer[:200]!r}")
        return 0
    status, head = int(statuses[1]), answer.partition(b"\r\n\r\n")[0].lower()
    if status == 501 and not attack.data.startswith((b"POST /", b"GET /")):
        return status
    if status >= 500 and not (status == 503 and b"retry-after:" in head):
        raise FoundError(f"it is answered {answer[-600:]!r}")
    if re.search(rb'"code": ?5\d\d', answer.partition(b"\r\n\r\n")[2]):
        raise FoundError(f"its stream ends with {answer[-600:]!r}")
    return status


def _right(data: bytes) -> bytes:
    """The data as this client would send it if it is valid HTTP."""
    line = re.match(rb"(\w+) (\S+) HTTP/1\.1\r\n", data)
    return http(line[1].decode(), line[2].decode("latin-1"), data.partition(b"\r\n\r\n")[2]) if line else b""


class Honest(threading.Thread):
    """Asks the same question until ``over``. ``wrong`` is an answer that differs from the first one."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self.over, self.wrong, self.right = url, threading.Event(), "", 0
        self._wanted = self._ask()

    def run(self) -> None:
        while not self.over.is_set() and not self.wrong:
            try:
                text = self._ask()
            except Exception as error:
                text = repr(error)
            if text == self._wanted:
                self.right += 1
            else:
                self.wrong = text

    def _ask(self) -> str:
        body = chat(QUESTION, max_tokens=60, ignore_eos=True)
        answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        while answer.status_code in (429, 503) and "Retry-After" in answer.headers:
            time.sleep(float(answer.headers["Retry-After"]))
            answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


class Watch:
    """The server's processes, and their open files and memory."""

    def __init__(self, server: Server) -> None:
        self._server = server
        names = ("ServeReplica", "EngineCore", "Worker")
        self._pids = {pid: name for name in names for pid in server.processes(name)}
        assert len(self._pids) >= len(names)
        self._held = {pid: self._holds(pid) for pid in self._pids}

    def check(self) -> None:
        for pid, name in self._pids.items():
            if not Path(f"/proc/{pid}").exists():
                raise FoundError(f"a process has died: {name}")

    def check_idle(self) -> None:
        """Check that the server is idle and its processes hold no more than before."""
        deadline = time.monotonic() + 300
        while busy := self._busy():
            if time.monotonic() > deadline:
                raise FoundError(f"left: {busy}")
            time.sleep(0.5)
        for pid, name in self._pids.items():
            (fds, memory), (fds_now, memory_now) = self._held[pid], self._holds(pid)
            print(f"{name}: {fds} files, then {fds_now}; {memory >> 20} MiB, then {memory_now >> 20}", flush=True)
            if fds_now > fds + _SLACK_FDS or memory_now > memory + _SLACK_BYTES:
                raise FoundError(f"{name} keeps files or memory")

    def _busy(self) -> list[str]:
        lines = httpx.get(f"{self._server.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
        return [line for line in lines if line.startswith(_GAUGES) and float(line.rsplit(" ", 1)[1])]

    def _holds(self, pid: int) -> tuple[int, int]:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGESIZE")


def fuzz(server: Server, seconds: float) -> int:
    """Attack for ``seconds``. Returns the exit status."""
    honest, statuses = Honest(server.url), Counter[int]()
    document = httpx.get(f"{server.url}/openapi.json").json()
    watch, begun = Watch(server), time.monotonic()
    honest.start()

    def try_out(attack: Attack) -> None:
        try:
            statuses[judge(attack, send(server.port, attack))] += 1
            watch.check()
            if honest.wrong:
                raise FoundError(f"an honest client got {honest.wrong!r}")
        except FoundError as finding:
            print(f"{finding}\n{attack}\nIt is made smaller.", flush=True)
            raise

    newest: list[Attack] = []

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(attack=attacks(document))
    def some(attack: Attack) -> None:
        newest[:] = [attack]
        try_out(attack)

    try:
        for attack in found_before():
            newest[:] = [attack]
            try_out(attack)
        while time.monotonic() - begun < seconds:
            some()
    except FoundError as finding:
        print(f"FOUND after {time.monotonic() - begun:.0f} s: {finding}\n{newest[0]}", flush=True)
        if newest[0] not in found_before():
            with FOUND.open("a") as file:
                file.write(json.dumps(newest[0].as_json()) + "\n")
        return 1
    finally:
        honest.over.set()
        print(f"statuses {dict(sorted(statuses.items()))}, {honest.right} honest answers", flush=True)
    honest.join()
    watch.check_idle()
    print(f"clean for {time.monotonic() - begun:.0f} s")
    return 0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    minutes, port = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(serve_file(Path(folder) / "serve.yaml", port, ARGS), port) as server,
    ):
        status = fuzz(server, 60 * minutes)
        if status:
            print(server.log.read_text()[-4000:])
        return status


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of a start: from `raylm serve embedded` to the first token, in wall time and in CPU time of processes.

    python -m benchmarks.http.start [--repeats 3] [--python .venv/bin/python] [--case "from a wheel"]

CPU seconds are those of all processes that the command starts, until the first token. They are read every 50 ms, so at
most the last 50 ms of a process are lost. ``--importtime FOLDER`` writes the imports of each process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.rows import Report, parser
from tests.serving import free_port

TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
PERIOD_S = 0.05
PARTS = {  # by the beginning of a process's title, or by a part of it
    "command": r"raylm\.cli\.main serve|raylm serve",
    "child": r"run-serve",
    "compiler": r"cc1plus|collect2|/as |g\+\+",
    "controller": r"ray::ServeController",
    "ingress": r"ray::ServeReplica:\w+:Ingress",
    "engine": r"ray::ServeReplica:\w+:Engine|ray::EngineCoreActor|ray::.*Core",
    "worker": r"ray::WorkerActor",
    "haproxy": r"haproxy",
    "proxy": r"ray::ProxyActor|ray::HAProxyManager",
    "gcs": r"gcs_server",
    "raylet": r"raylet/raylet|src/ray/raylet",
    "agents": r"dashboard|log_monitor|autoscaler|runtime_env",
    "idle workers": r"ray::IDLE|default_worker",
}
UNITS = {"first token": "s", "CPU": "CPU s"} | dict.fromkeys([*PARTS, "others"], "CPU s")


class Sampler(threading.Thread):
    """Keeps the CPU seconds and the last title of each process of a session."""

    def __init__(self, first: int) -> None:
        super().__init__(daemon=True)
        self._first, self.ended = first, threading.Event()
        self.seconds: dict[int, float] = {}
        self.titles: dict[int, str] = {}

    def run(self) -> None:
        while not self.ended.wait(PERIOD_S):
            self.sample()

    def sample(self) -> None:
        parents: dict[int, tuple[int, float]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    parents[int(entry.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) * TICKS_S
                except OSError:
                    continue
        known = {self._first, *self.seconds}
        for _ in range(8):  # all descendants
            known |= {pid for pid, (parent, _) in parents.items() if parent in known}
        for pid in known & parents.keys():
            self.seconds[pid] = parents[pid][1]
            try:
                self.titles[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or self.titles.get(
                    pid, ""
                )
            except OSError:
                continue

    def parts(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for pid, seconds in self.seconds.items():
            title = self.titles.get(pid, "")
            found[next((name for name, one in PARTS.items() if re.search(one, title)), "others")] += seconds
        return dict(found)


def measure(python: Path, importtime: Path | None, environment: dict[str, str]) -> dict[str, float]:
    """One start. The server is ended afterwards."""
    port, started = free_port(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w") as log:
        environment = environment | {"XDG_STATE_HOME": folder}
        if importtime is not None:
            environment |= {"PYTHONPROFILEIMPORTTIME": "1"}
        command = [python, "-m", "raylm.cli.main", "serve", "embedded", "--no-dashboard", "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        sampler = Sampler(server.pid)
        sampler.start()
        try:
            _first_token(port, server, Path(folder, "log"))
            took = time.perf_counter() - started
            sampler.ended.set()
            sampler.join()
            sampler.sample()
        finally:
            sampler.ended.set()
            server.send_signal(signal.SIGINT)
            server.wait()
            if importtime is not None:
                (importtime / "log").write_text(Path(folder, "log").read_text())
    parts = sampler.parts()
    return {"first token": took, "CPU": sum(parts.values())} | parts


def _first_token(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    body = {"prompt": "A KV cache", "max_tokens": 1, "temperature": 0}
    while True:
        try:
            if httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if server.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()}")
        time.sleep(0.05)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--python", type=Path, default=Path(sys.executable), help="another one, with its own RayLM")
    options.add_argument("--case", default="second start", help="the name of the case")
    options.add_argument("--path", help="PATH of the server, as one without a compiler")
    options.add_argument("--importtime", type=Path, metavar="FOLDER", help="an existing folder")
    given = options.parse_args()
    environment = dict(os.environ) | ({"PATH": given.path} if given.path else {})
    report = Report("start", UNITS, given.out)
    for _ in range(given.repeats):
        report.add(given.case, measure(given.python.absolute(), given.importtime, environment))


if __name__ == "__main__":
    main()

"""Seconds of a server's start, of the recovery from a killed actor, and of its stop.

    python -m benchmarks.http.lifecycle [--repeats 3]

Every round starts `raylm serve configs/llama.yaml` on a free port twice. One server is stopped while it is idle. The
other is stopped after its worker and its EngineCore were killed with running streams. Prints the minimum and the
maximum over all rounds. tests/test_ray_serving.py asserts the behaviour itself.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx

from benchmarks.rows import Report, parser
from tests.serving import Server, chat, free_port, serve_file

QUESTION = "What is a KV cache?"
STREAMS = 4

Times = defaultdict[str, list[float]]


class Stream:
    """A client that reads a long answer. ``ended_s`` is the time when its stream ended, for any reason."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/v1/chat/completions"
        self._begun = threading.Event()
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._begun.wait(60)

    def wait(self) -> None:
        self._thread.join(60)

    def _read(self) -> None:
        body = chat(QUESTION, stream=True, ignore_eos=True, max_tokens=7000)
        with httpx.stream("POST", self._url, json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                self._begun.set()
        self.ended_s = time.perf_counter()


def ask(server: Server) -> bool:
    body = chat(QUESTION, max_tokens=8)
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def kill(server: Server, victim: str, times: Times) -> None:
    """Kill an actor with SIGKILL while a client reads."""
    stream = Stream(server)
    started = time.perf_counter()
    server.kill_actor(victim)
    stream.wait()
    times[f"a stream ends after kill -9 of {victim}"].append(stream.ended_s - started)
    server.wait_until(lambda: ask(server), "does not come back")
    times[f"an answer again after kill -9 of {victim}"].append(time.perf_counter() - started)


def live(folder: Path, times: Times, *, eventful: bool) -> None:
    port, started = free_port(), time.perf_counter()
    with Server(serve_file(folder / "serve.yaml", port, {}), port) as server:
        server.wait_until(lambda: ask(server), "does not answer")
        times["start until the first answer"].append(time.perf_counter() - started)
        if eventful:
            for victim in ("WorkerActor", "EngineCoreActor"):
                kill(server, victim, times)
        streams = [Stream(server) for _ in range(STREAMS if eventful else 0)]
        started = time.perf_counter()
        server.stop(signal.SIGTERM)
        ended = time.perf_counter() - started
        times[f"stop with {STREAMS} running streams" if eventful else "stop when idle"].append(ended)
        for stream in streams:
            stream.wait()
        if left := server.processes():
            raise SystemExit(f"processes {left} are left of a server that was stopped")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    times: Times = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            live(Path(folder), times, eventful=False)
            live(Path(folder), times, eventful=True)
    report = Report("lifecycle", {"least": "s", "most": "s"}, args.out)
    for name, seconds in times.items():
        report.add(name, {"least": min(seconds), "most": max(seconds)})


if __name__ == "__main__":
    main()

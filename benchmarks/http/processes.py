"""The CPU time of a served token by process, and the share of the offline rate that HTTP clients get.

    python -m benchmarks.http.processes --model DIR [--clients 1 8 32] [--rounds 3] [--beside ...]

Serves the model with `raylm serve`, and also loads it in a runner of raylm.LLM. Each round measures both in turn:
offline, as many prompts at once as there are clients, and then streams of as many clients over HTTP. CPU time is the
kernel's account of each process of the server, and of this process as the client, while the streams run. In between
both are left alone for a while, which measures an idle server. ``--beside DIR [NAME=VALUE ...]`` also serves another
checkout of RayLM, or this one with other environment variables, in turn with this one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.compare.engines import Command, RunnerEngine, ServerEngine, adopt_orphans, family
from benchmarks.compare.workloads import PROMPT, SERVED_TOKENS, Prompts, WordClient, Words
from benchmarks.http.serving import Load, closed_loop
from benchmarks.rows import Report, parser
from raylm.client import Connection

ROOT = Path(__file__).parents[2]
START_LIMIT_S, IDLE_S = 240, 5
MOST_THREADS = 24  # in the output
_TICKS = os.sysconf("SC_CLK_TCK")
# regular expressions for command lines; the first match counts, all other processes are "others"
PARTS = {
    "worker": r"^ray::WorkerActor",
    "EngineCore": r"^ray::EngineCoreActor",
    "ingress": r"^ray::ServeReplica:\w+:Ingress",
    "HAProxy": r"^\S*haproxy",
    "Serve": r"^ray::Serve|^ray::ProxyActor|^ray::HAProxy",
    "raylet": r"raylet/raylet",
    "gcs": r"gcs_server",
    "agents": r"dashboard|runtime_env/agent|log_monitor|monitor\.py",
}
SERVER = [*PARTS, "others"]
RATES = {"offline": "tok/s", "HTTP": "tok/s", "HTTP / offline": "", "TTFT p50": "ms", "ITL p50": "ms", "ITL p99": "ms"}
UNITS = RATES | dict.fromkeys(["client", *SERVER], "ms/token") | {"machine": "cores"}
IDLE_UNITS = dict.fromkeys(SERVER, "ms/s") | {"machine": "cores"}


def _members(root: int) -> Iterator[tuple[str, Path]]:
    """The part and the folder in /proc of each process below ``root``."""
    for pid in family(root):
        folder = Path(f"/proc/{pid}")
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield next((part for part, pattern in PARTS.items() if re.search(pattern, line)), "others"), folder


def _times(folder: Path) -> tuple[str, float]:
    """Name and CPU seconds of a process or thread; zero after its end."""
    try:
        head, _, tail = (folder / "stat").read_text().rpartition(")")
    except OSError:
        return "", 0.0
    return head.partition("(")[2], sum(map(int, tail.split()[11:13])) / _TICKS


def _machine_busy() -> float:
    """CPU seconds of the whole machine since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / _TICKS


class Used:
    """CPU seconds from its creation until ``stop``, by part of the server below ``root``, and by "part/thread".

    Also measures this process (the client), the whole machine, and the elapsed seconds.
    """

    def __init__(self, root: int, *, threads: bool = False) -> None:
        self._root, self._threads = root, threads
        self._began = self._now()

    def _now(self) -> dict[str, float]:
        now = defaultdict(float, client=time.process_time(), machine=_machine_busy(), passed=time.perf_counter())
        for part, folder in _members(self._root):
            now[part] += _times(folder)[1]
            if self._threads:
                for name, seconds in map(_times, (folder / "task").iterdir()):
                    now[f"{part}/{name}"] += seconds
        return now

    def stop(self) -> dict[str, float]:
        now = self._now()
        return {name: seconds - self._began.get(name, 0.0) for name, seconds in now.items()}


class Server(ServerEngine):
    """`raylm serve` of a checkout, with environment variables as NAME=VALUE."""

    def __init__(self, tree: str, variables: list[str], model: Path, port: int, scratch: Path) -> None:
        # Ray's workers import from the folder in which the driver was started.
        words = ["env", "-C", tree, f"PYTHONPATH={tree}", *variables, sys.executable, "-m", "raylm.cli.main", "serve"]
        command = Command([*words, str(model), "--port", str(port), "--dtype", "bfloat16"])
        name = " ".join([Path(tree).name, *variables])
        super().__init__(name, command, scratch / f"{port}.log", START_LIMIT_S, f"http://127.0.0.1:{port}", "")


async def load(server: Server, prompts: Prompts, clients: int, total: int) -> Load:
    async with Connection(server.url, timeout_s=START_LIMIT_S) as connection:
        server.model = server.model or await connection.first_model()
        client = WordClient(connection, server, prompts)
        started = time.perf_counter()
        answers = await closed_loop(client.ask, clients, total)
    found = Load(time.perf_counter() - started, answers)
    if found.errors:
        raise SystemExit(f"{len(found.errors)} requests failed: {found.errors[0]}")
    return found


def serve(server: Server, prompts: Prompts, clients: int, total: int, *, threads: bool) -> dict[str, float]:
    """Figures of one load. Prints the CPU time of threads immediately."""
    used = Used(server.pid, threads=threads)
    figures = asyncio.run(load(server, prompts, clients, total)).figures()
    seconds = used.stop()
    each = {name: 1e3 * value / (total * SERVED_TOKENS) for name, value in seconds.items()}
    for name in sorted((name for name in each if "/" in name), key=lambda name: -each[name])[:MOST_THREADS]:
        print(f"    {name:44}{each[name]:.3f} ms/token")
    found = {"HTTP": figures["output"]} | {name: figures[name] for name in ("TTFT p50", "ITL p50", "ITL p99")}
    cpu = {part: each[part] for part in ["client", *SERVER] if part in each}
    return found | cpu | {"machine": seconds["machine"] / seconds["passed"]}


def idle(server: Server, out: Path | None) -> None:
    used = Used(server.pid)
    time.sleep(IDLE_S)
    seconds = used.stop()
    cpu = {part: 1e3 * seconds[part] / seconds["passed"] for part in SERVER if part in seconds}
    report = Report("processes", IDLE_UNITS, out)
    report.add(f"{server.name}, idle", cpu | {"machine": seconds["machine"] / seconds["passed"]})


def offline(runner: RunnerEngine, prompts: Prompts, clients: int, total: int) -> float:
    """Tokens per second of waves of ``clients`` prompts."""
    runner.begin()
    waves = -(-total // clients)
    seconds = sum(runner.generate(prompts.many(clients, PROMPT), SERVED_TOKENS) for _ in range(waves))
    return waves * clients * SERVED_TOKENS / seconds


def start_runner(model: Path, scratch: Path) -> RunnerEngine:
    words = [sys.executable, str(ROOT / "benchmarks" / "compare" / "runner.py"), "raylm"]
    command = Command([*words, json.dumps({"model": str(model), "dtype": "bfloat16"})])
    return RunnerEngine("offline", command, scratch / "offline.log", START_LIMIT_S)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--waves", type=int, default=3, help="requests of each client")
    options.add_argument("--least", type=int, default=6, help="requests of a load, at the least")
    options.add_argument("--beside", nargs="+", action="append", default=[], metavar=("DIR", "NAME=VALUE"))
    options.add_argument("--port", type=int, default=8130)
    options.add_argument("--no-offline", action="store_true")
    options.add_argument("--threads", action="store_true", help="tell the CPU time of threads too")
    args = options.parse_args()
    adopt_orphans()
    prompts = Prompts(Words(args.model), "processes")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        servers = [
            stack.enter_context(Server(tree, variables, args.model, args.port + at, scratch))
            for at, (tree, *variables) in enumerate([[str(ROOT)], *args.beside])
        ]
        runner = None if args.no_offline else stack.enter_context(start_runner(args.model, scratch))
        for server in servers:
            asyncio.run(load(server, prompts, 8, 16))
            idle(server, args.out)
        if runner is not None:
            offline(runner, prompts, 8, 16)
        report = Report("processes", UNITS, args.out)
        for turn, clients in itertools.product(range(args.rounds), args.clients):
            total = max(args.least, args.waves * clients)
            figures = {} if runner is None else {"offline": offline(runner, prompts, clients, total)}
            for server in servers[:: 1 if turn % 2 else -1]:
                figures |= serve(server, prompts, clients, total, threads=args.threads)
                if runner is not None:
                    figures["HTTP / offline"] = figures["HTTP"] / figures["offline"]
                report.add(f"{server.name}, {clients} clients", figures, f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

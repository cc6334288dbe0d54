"""How long a token takes from the worker that drew it to the client that reads it, with everything between them.

    python -m benchmarks.http.delivery --model DIR [--clients 1 8 32] [--requests-per-client 2]

Serves the model as configs/llama.yaml does (Ray, HAProxy), except that the worker notes when each step was over. A
chunk that a client reads is counted from the last step before it: as long as what comes out is far below the time of a
step, that is the step which drew it.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import bisect
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from ray.serve import Application

import raylm.app
from benchmarks.http.serving import Answer, Client, closed_loop, quantile
from raylm.cli.serve_process import session_members
from raylm.config import Config
from raylm.engine import Engine, ray_executor
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo

NOTES = "DELIVERY_NOTES"  # names the file of the times, for the worker's process
ROOT = Path(__file__).parents[2]
PORT = 8127
START_LIMIT_S = 120


class NotingWorker(ray_executor.WorkerActor):
    """Writes down when each step was over."""

    def start(self, port: int = 0) -> WorkerInfo:
        """As any worker."""
        worker: Any = self._worker
        launch, notes = worker.launch, os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)

        def noted(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
            output: Callable[[], ModelRunnerOutput] = launch(plan)
            os.write(notes, array.array("d", [time.time()]).tobytes())
            return output

        worker.launch = noted
        return super().start(port)


class NotingEngine(Engine):
    """In the process that unpickles this class, workers take notes."""


ray_executor.WorkerActor = NotingWorker  # type: ignore[misc]


def build_app(args: dict[str, Any]) -> Application:
    """raylm.build_app with workers that take notes."""
    raylm.app.Engine = NotingEngine  # type: ignore[misc]
    return raylm.app.build_app(Config.model_validate(args))


class NotingClient(Client):
    """Writes down when each chunk came."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came: list[float] = []

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, start: float) -> None:
        first = len(self.came)
        async for line in response.content:
            if line.startswith(b"data: {"):
                self.came.append(time.time())
        del self.came[first : first + 1], self.came[-1:]  # the first waits for its prompt, the last has no token
        answer.tokens = self.max_tokens


async def load(url: str, model: str, clients: int, requests: int) -> list[float]:
    """When the chunks of a closed loop came, in seconds since the epoch."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        client = NotingClient(session, url, model, 128, 64)
        errors = [answer.error for answer in await closed_loop(client.ask, clients, requests) if answer.error]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    return client.came


def delays(came: list[float], steps: list[float]) -> list[float]:
    """Seconds from the last step before each chunk."""
    return [at - steps[place - 1] for at in came if (place := bisect.bisect_left(steps, at))]


async def ready(url: str) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


def serve(scratch: Path, model: str, notes: Path) -> subprocess.Popen[bytes]:
    """Start the server, in a session of its own."""
    data = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    data["http_options"]["port"] = PORT
    (application,) = data["applications"]
    application["import_path"] = "benchmarks.http.delivery:build_app"
    application["args"] |= {"model": model, "dtype": "bfloat16"}
    application["runtime_env"]["env_vars"][NOTES] = str(notes)
    path = scratch / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "RAY_ADDRESS": "local"}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    with (scratch / "log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End all processes of the server's session: `serve run` leaves HAProxy behind."""
    members = session_members(server.pid)
    server.send_signal(signal.SIGINT)
    server.wait(60)
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def measure(url: str, model: str, notes: Path, clients: int, requests: int) -> str:
    """One row of the table."""
    noted = notes.stat().st_size
    came = asyncio.run(load(url, model, clients, requests))
    steps = array.array("d", notes.read_bytes()[noted:]).tolist()
    found = sorted(1e3 * delay for delay in delays(came, steps))
    between = quantile([1e3 * (b - a) for a, b in pairwise(steps)], 0.5)
    quantiles = "".join(f"{quantile(found, q):8.1f}" for q in (0.5, 0.9, 0.99))
    return f"{clients:7} {len(found):8,} {between:9.1f} {quantiles}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests-per-client", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        notes = Path(scratch) / "notes"
        notes.touch()
        server = serve(Path(scratch), args.model, notes)
        try:
            url = f"http://127.0.0.1:{PORT}"
            asyncio.run(ready(url))
            print("clients   chunks   step ms   delay ms: p50     p90     p99")
            measure(url, args.model, notes, 1, 2)
            for clients in args.clients:
                print(measure(url, args.model, notes, clients, clients * args.requests_per_client), flush=True)
        finally:
            stop(server)


if __name__ == "__main__":
    main()

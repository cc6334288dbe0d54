"""The time from the end of a worker's step to the client's read of its token, with all processes between them.

    python -m benchmarks.http.delivery --model DIR [--clients 1 8 32] [--requests-per-client 2]

Serves the model as configs/llama.yaml does (Ray, HAProxy), but the worker records the end of each step. The delay of a
chunk is the time since the last step before it. This step is the right one as long as delays are much shorter than
steps.
"""

from __future__ import annotations

import array
import asyncio
import bisect
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from ray.serve import Application

import raylm.app
from benchmarks.compare.engines import Command, ServerEngine, adopt_orphans
from benchmarks.http.serving import Answer, Client, closed_loop
from benchmarks.rows import Report, parser, quantile
from raylm.client import Connection, ServerError
from raylm.config import Config
from raylm.engine import Engine, ray_executor
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo

NOTES = "DELIVERY_NOTES"  # names the file of the times, for the worker's process
ROOT = Path(__file__).parents[2]
PORT = 8127
START_LIMIT_S = 120
UNITS = {"chunks": "", "a step": "ms", "p50": "ms", "p90": "ms", "p99": "ms"}


class NotingWorker(ray_executor.WorkerActor):
    """Records the end of each step."""

    def start(self, port: int = 0) -> WorkerInfo:
        self._notes = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
        return super().start(port)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        output = super().launch(plan)
        os.write(self._notes, array.array("d", [time.time()]).tobytes())
        return output


class NotingEngine(Engine):
    """An Engine whose replicas import this module, which replaces the worker class."""


ray_executor.WorkerActor = NotingWorker  # type: ignore[misc]


def build_app(args: dict[str, Any]) -> Application:
    """raylm.build_app with workers that record times."""
    raylm.app.Engine = NotingEngine  # type: ignore[attr-defined]
    return raylm.app.build_app(Config.model_validate(args))


class NotingClient(Client):
    """Records the time of each chunk."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came: list[float] = []

    async def ask(self) -> Answer:
        try:
            came = [time.time() async for _ in self.connection.stream("/v1/completions", self.body())]
        except ServerError as error:
            return Answer(error=error.message)
        self.came += came[1:-1]  # the first includes the prompt, the last has no token
        return Answer(tokens=self.max_tokens)


async def load(url: str, model: str, clients: int, requests: int) -> list[float]:
    """The times of the chunks of a closed loop, in seconds since the epoch."""
    async with Connection(url, timeout_s=600) as connection:
        client = NotingClient(connection, model, 128, 64)
        answers = await closed_loop(client.ask, clients, requests)
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    return client.came


def delays(came: list[float], steps: list[float]) -> list[float]:
    """Seconds between each chunk and the last step before it."""
    return [at - steps[place - 1] for at in came if (place := bisect.bisect_left(steps, at))]


def server(scratch: Path, model: str, notes: Path) -> ServerEngine:
    """The server, which is not started yet."""
    data = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    data["http_options"]["port"] = PORT
    (application,) = data["applications"]
    application["import_path"] = "benchmarks.http.delivery:build_app"
    application["args"] |= {"model": model, "dtype": "bfloat16"}
    application.setdefault("runtime_env", {}).setdefault("env_vars", {})[NOTES] = str(notes)
    path = scratch / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    environment = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "RAY_ADDRESS": "local"}
    command = Command([str(Path(sys.executable).with_name("serve")), "run", str(path)], environment)
    return ServerEngine("RayLM", command, scratch / "log", START_LIMIT_S, f"http://127.0.0.1:{PORT}", model)


def measure(url: str, model: str, notes: Path, clients: int, requests: int) -> dict[str, float]:
    noted = notes.stat().st_size
    came = asyncio.run(load(url, model, clients, requests))
    steps = array.array("d", notes.read_bytes()[noted:]).tolist()
    found = [1e3 * delay for delay in delays(came, steps)]
    between = quantile([1e3 * (b - a) for a, b in pairwise(steps)], 0.5)
    quantiles = {f"p{100 * q:.0f}": quantile(found, q) for q in (0.5, 0.9, 0.99)}
    return {"chunks": float(len(found)), "a step": between, **quantiles}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--requests-per-client", type=int, default=2)
    args = options.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as scratch:
        notes = Path(scratch) / "notes"
        notes.touch()
        with server(Path(scratch), args.model, notes) as serving:
            report = Report("delivery", UNITS, args.out)
            measure(serving.url, args.model, notes, 1, 2)
            for clients in args.clients:
                figures = measure(serving.url, args.model, notes, clients, clients * args.requests_per_client)
                report.add(f"{args.model}, {clients} clients", figures)


if __name__ == "__main__":
    main()

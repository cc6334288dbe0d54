"""Seconds until the first answer without a running engine (engine.replicas: {min: 0}), and those of the engine's start.

    python -m benchmarks.http.from_zero [--repeats 6] [--ingresses 1]

In each round the engine has ended after a time without requests, and a client requests one token. `start` is the time
from the replica's start by Serve's controller until the EngineCore has its workers ready. `beyond` is the additional
wait of the client: `decided` until the start begins, and `answered` from its end until the first token. In every other
round the request is sent as soon as the engine is gone, and in the others some seconds later.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import httpx
import ray
from ray.util import list_named_actors

from benchmarks.rows import Report, parser
from raylm import ray_private
from raylm.engine import NAMESPACE, EngineName
from tests.serving import chat
from tests.updating import Updates, updated_server

UNITS = {"first answer": "s", "start": "s", "beyond": "s", "decided": "s", "answered": "s"}
POLL_S = 0.02


class ReadyEngine(threading.Thread):
    """Waits for the next EngineCore. ``at`` is the time when it was ready."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0

    def run(self) -> None:
        while not (names := _cores()):
            time.sleep(POLL_S)
        ray.get(ray.get_actor(names[0], NAMESPACE).info.remote())
        self.at = time.time()


def _cores() -> list[str]:
    found = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == NAMESPACE and EngineName.parse(actor["name"])]


def _begun() -> float:
    """The time when the controller began to start the engine."""
    details = ray_private.serve_details()
    assert details is not None
    (replica,) = details["applications"]["default"]["deployments"]["Engine"]["replicas"]
    return float(replica["start_time_s"])


def measure(updates: Updates, pause_s: float) -> dict[str, float]:
    updates.wait(lambda: not updates.replicas("Engine") and not _cores(), "keeps its engine")
    time.sleep(pause_s)
    ready, asked = ReadyEngine(), time.time()
    ready.start()
    body = chat("What is a KV cache?", max_tokens=1)
    answer = httpx.post(f"{updates.server.url}/v1/chat/completions", json=body, timeout=120)
    answered = time.time()
    if answer.status_code != 200:
        raise SystemExit(f"the answer was {answer.status_code}: {answer.text}")
    ready.join()
    begun = _begun()
    start = ready.at - begun
    return {
        "first answer": answered - asked,
        "start": start,
        "beyond": answered - asked - start,
        "decided": begun - asked,
        "answered": answered - ready.at,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=6)
    options.add_argument("--ingresses", type=int, default=1)
    args = options.parse_args()
    report = Report("from_zero", UNITS, args.out)
    served = {
        "engine": {"replicas": {"min": 0, "max": 1, "downscale_delay_s": 1}, "threads": 2},
        "ingress": {"replicas": args.ingresses},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        updated_server(Path(folder) / "serve.yaml", engines=0, **served) as updates,
    ):
        for number in range(args.repeats):
            pause_s = 5.0 * (number % 2)
            report.add(f"{args.ingresses} ingress, asked {pause_s:g} s after the end", measure(updates, pause_s))


if __name__ == "__main__":
    main()

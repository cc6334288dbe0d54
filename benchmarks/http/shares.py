"""TTFT of a key beside one that floods, over HTTP: two engines shared by two keys, and one engine that a key has alone.

    python -m benchmarks.http.shares --requests 120 --rate 3

Of a fleet of two equal engines the share of one of two keys is one engine. So its share alone is `raylm serve` with one
engine and nobody else; beside a flooder there are two engines, and the other key keeps ``--flood`` requests open, more
than both engines run at once, --batch prompts in each. With --fcfs the same again by first come, first served. Each
engine has one thread. Where there are fewer cores than processes at work, what the flooder costs beyond its share is
also theirs. So what the requests of either key waited in the engines' queues is told as well, by the ingress's
timelines.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rows import Report, parser, quantile
from raylm.bench.loops import open_loop, poisson
from raylm.client import Answer, Connection, ask
from tests.serving import Server, free_port, serve_file

KEYS = {"quiet": "sk-quiet-0123456789abcdef", "flood": "sk-flood-0123456789abcdef"}
UNITS = {
    "requests": "", "errors": "", "TTFT p50": "ms", "TTFT p99": "ms", "of its share p99": "x", "queue p50": "ms",
    "queue p99": "ms", "flooder's queue p50": "ms", "flooder's answers": "",
}  # fmt: skip
_SAMPLE = 100  # timelines of a key that are looked at


def bodies(rng: random.Random, max_tokens: int, *, stream: bool) -> Iterator[dict[str, Any]]:
    """Completions of prompts that have nothing in common."""
    limits = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    for number in itertools.count():
        prompt = f"{number} " + " ".join(str(rng.randrange(1000)) for _ in range(rng.randint(10, 60)))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        yield {"model": "embedded", "prompt": prompt, "stream": stream} | limits | options


async def flood(url: str, args: argparse.Namespace, answered: list[int]) -> None:
    """Keep requests open until cancelled; the statuses of their answers go to ``answered``."""
    asked = bodies(random.Random(2), args.max_tokens, stream=False)
    headers = {"Authorization": f"Bearer {KEYS['flood']}"}

    async def one_after_another(session: aiohttp.ClientSession) -> None:
        while True:
            some = list(itertools.islice(asked, args.batch))
            body = some[0] | {"prompt": [one["prompt"] for one in some]}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
                answered.append(response.status)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session, asyncio.TaskGroup() as group:
        for _ in range(args.flood):
            group.create_task(one_after_another(session))


async def queued_ms(url: str, name: str) -> list[float]:
    """What the newest requests of a key waited in engines' queues."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS[name]}"}) as session:

        async def get(path: str) -> Any:
            async with session.get(url + path) as response:
                response.raise_for_status()
                return await response.json()

        listed = await get(f"/v1/requests?state=recent&key={name}&limit={_SAMPLE}")
        timelines = [await get(f"/v1/requests/{line['id']}") for line in listed["data"]]
    return [1e3 * sum(one["seconds"] for one in line["phases"] if one["phase"] == "queue") for line in timelines]


async def measure(url: str, args: argparse.Namespace, *, floods: bool) -> tuple[list[Answer], dict[str, float]]:
    """The quiet key's answers, and figures of queues and of the flooder."""
    asked, answered = bodies(random.Random(1), args.max_tokens, stream=True), list[int]()
    async with Connection(url, KEYS["quiet"], timeout_s=120) as connection:
        for _ in range(8):  # it learns how fast it is
            await ask(connection, "/v1/completions", next(asked))
        flooding = asyncio.create_task(flood(url, args, answered)) if floods else None
        if flooding is not None:
            await asyncio.sleep(args.settle)
        before = len(answered)
        asks = [partial(ask, connection, "/v1/completions", next(asked)) for _ in range(args.requests)]
        answers, _ = await open_loop(asks, poisson(args.rate, args.requests, seed=3), lambda: None)
        if flooding is not None:
            if flooding.done():
                flooding.result()
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
    if refused := [status for status in answered if status != 200]:
        print(f"the flooder was answered {sorted(set(refused))} {len(refused)} times")
    times = await queued_ms(url, "quiet")
    figures = {"queue p50": quantile(times, 0.5), "queue p99": quantile(times, 0.99)}
    if floods:
        figures["flooder's queue p50"] = quantile(await queued_ms(url, "flood"), 0.5)
        figures["flooder's answers"] = answered[before:].count(200) * args.batch
    return answers, figures


def serve(
    engines: int, policy: str, args: argparse.Namespace, *, floods: bool
) -> tuple[list[Answer], dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        keys = folder / "keys"
        keys.write_text("".join(f"{key}: {secret}\n" for key, secret in KEYS.items()))
        knobs = {
            "engine": {"replicas": engines, "threads": 1},
            "scheduler": {"policy": policy, "max_num_seqs": args.sequences},
            "ingress": {"api_keys_file": str(keys)},
        }
        with Server(serve_file(folder / "serve.yaml", port, knobs), port) as server:
            server.wait_ready()
            found = asyncio.run(measure(server.url, args, floods=floods))
            server.stop(signal.SIGTERM)
            return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=120, help="of the quiet key")
    options.add_argument("--rate", type=float, default=3.0, help="of them a second")
    options.add_argument("--flood", type=int, default=10, help="requests that the other key keeps open")
    options.add_argument("--batch", type=int, default=16, help="prompts in each of them")
    options.add_argument("--sequences", type=int, default=32, help="that run at once in an engine")
    options.add_argument("--max-tokens", type=int, default=48)
    options.add_argument("--settle", type=float, default=5.0, help="seconds of flood before anything is measured")
    options.add_argument("--fcfs", action="store_true", help="measure first come, first served, too")
    args = options.parse_args()
    cases = {"its share alone": (1, "fair", False), "beside a flooder": (2, "fair", True)}
    if args.fcfs:
        cases["beside a flooder, fcfs"] = (2, "fcfs", True)
    report, share = Report("shares_http", UNITS, args.out), 0.0
    for name, (engines, policy, floods) in cases.items():
        answers, others = serve(engines, policy, args, floods=floods)
        times = [1e3 * answer.ttft for answer in answers if answer.error is None]
        p99 = quantile(times, 0.99) if times else float("nan")
        share = share or p99
        figures = {
            "requests": len(answers), "errors": len(answers) - len(times), "TTFT p50": quantile(times, 0.5),
            "TTFT p99": p99, "of its share p99": p99 / share,
        }  # fmt: skip
        report.add(name, figures | others)


if __name__ == "__main__":
    main()

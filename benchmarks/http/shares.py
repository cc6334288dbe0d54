"""TTFT of a key beside a key that floods, over HTTP: with two engines shared by both keys, and with an engine for each.

    python -m benchmarks.http.shares --requests 120 --rate 3

With two equal engines and two keys, the fair share of a key is one engine. So the baseline has a server with one engine
for each key, at the same time on the same machine. It is compared with one server of two engines that both keys share.
The flooding key keeps ``--flood`` requests open, more than both engines run at the same time, with --batch prompts in
each. ``--alone`` also measures the quiet key's server without other load, ``--fcfs`` also the shared engines with first
come, first served. Each engine has one thread. The timelines give the phases of the time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rows import Report, parser, quantile
from raylm.bench.loops import open_loop, poisson
from raylm.client import Answer, Connection, ask
from tests.serving import Server, free_port, serve_file

KEYS = {"quiet": "sk-quiet-0123456789abcdef", "flood": "sk-flood-0123456789abcdef"}
PHASES = {
    "ingress": ("admission", "body", "parse", "tokenize", "route"), "send": ("send",), "queue": ("queue",),
    "prefill": ("prefill",), "delivery": ("delivery",),
}  # fmt: skip
UNITS = {
    "requests": "", "errors": "", "TTFT p50": "ms", "TTFT p99": "ms", "of its share p99": "x",
    **{f"{name} {column}": "ms" for name in PHASES for column in ("p50", "p99")},
    "flooder's queue p50": "ms", "flooder's answers": "",
}  # fmt: skip
OWN, SHARED, ALONE, FCFS = "an engine for each key", "two shared engines", "its engine alone", "shared engines, fcfs"
_SAMPLE = 100  # number of a key's timelines that are read


def bodies(rng: random.Random, max_tokens: int, *, stream: bool) -> Iterator[dict[str, Any]]:
    """Completions of prompts without common prefixes."""
    limits = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    for number in itertools.count():
        prompt = f"{number} " + " ".join(str(rng.randrange(1000)) for _ in range(rng.randint(10, 60)))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        yield {"model": "embedded", "prompt": prompt, "stream": stream} | limits | options


async def flood(url: str, args: argparse.Namespace, answered: list[int]) -> None:
    """Keep requests open until cancelled. Appends the statuses of their answers to ``answered``."""
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


async def phases_ms(url: str, name: str) -> list[dict[str, float]]:
    """The phases of a key's newest requests, from the ingress's timelines."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS[name]}"}) as session:

        async def get(path: str) -> Any:
            async with session.get(url + path) as response:
                response.raise_for_status()
                return await response.json()

        listed = await get(f"/v1/requests?state=recent&key={name}&limit={_SAMPLE}")
        found = []
        for line in listed["data"]:
            spent: Counter[str] = Counter()
            for one in (await get(f"/v1/requests/{line['id']}"))["phases"]:
                spent[one["phase"]] += 1e3 * one["seconds"]
            found.append(dict(spent))
        return found


async def measure(url: str, flooded: str | None, args: argparse.Namespace) -> tuple[list[Answer], dict[str, float]]:
    """The quiet key's answers at ``url`` while the other key floods ``flooded``, and figures of phases and flood."""
    asked, answered = bodies(random.Random(1), args.max_tokens, stream=True), list[int]()
    async with Connection(url, KEYS["quiet"], timeout_s=120) as connection:
        for _ in range(8):  # the server learns its speed
            await ask(connection, "/v1/completions", next(asked))
        flooding = asyncio.create_task(flood(flooded, args, answered)) if flooded else None
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
    spent = await phases_ms(url, "quiet")
    figures = {}
    for name, phases in PHASES.items():
        times = [sum(one.get(phase, 0.0) for phase in phases) for one in spent]
        figures |= {f"{name} p50": quantile(times, 0.5), f"{name} p99": quantile(times, 0.99)}
    if flooded:
        queued = [one.get("queue", 0.0) for one in await phases_ms(flooded, "flood")]
        figures["flooder's queue p50"] = quantile(queued, 0.5)
        figures["flooder's answers"] = answered[before:].count(200) * args.batch
    return answers, figures


def behind(pid: int) -> None:
    """Give the clients a higher priority than a server's process, because real clients run on other machines.

    Linux divides the cores between sessions (autogroups). A session that runs rarely may wait for a second.
    """
    with suppress(OSError):  # no such file without autogroups
        Path(f"/proc/{pid}/autogroup").write_text("10")


@contextmanager
def serve(engines: int, policy: str, args: argparse.Namespace) -> Iterator[str]:
    """The URL of a server for both keys."""
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
            behind(server.processes()[0])
            yield server.url
            server.stop(signal.SIGTERM)


def case(name: str, args: argparse.Namespace) -> tuple[list[Answer], dict[str, float]]:
    with ExitStack() as stack:
        if name == OWN:
            url, flooded = (stack.enter_context(serve(1, "fair", args)) for _ in range(2))
            return asyncio.run(measure(url, flooded, args))
        url = stack.enter_context(serve(1 if name == ALONE else 2, "fcfs" if name == FCFS else "fair", args))
        return asyncio.run(measure(url, None if name == ALONE else url, args))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=120, help="of the quiet key")
    options.add_argument("--rate", type=float, default=3.0, help="of them a second")
    options.add_argument("--flood", type=int, default=10, help="requests that the other key keeps open")
    options.add_argument("--batch", type=int, default=16, help="prompts in each of them")
    options.add_argument("--sequences", type=int, default=32, help="that run at once in an engine")
    options.add_argument("--max-tokens", type=int, default=48)
    options.add_argument("--settle", type=float, default=5.0, help="seconds of flood before anything is measured")
    options.add_argument("--alone", action="store_true", help="measure one engine where nobody floods, too")
    options.add_argument("--fcfs", action="store_true", help="measure first come, first served, too")
    args = options.parse_args()
    report, share = Report("shares_http", UNITS, args.out), 0.0
    for name in [OWN, SHARED, *[ALONE] * args.alone, *[FCFS] * args.fcfs]:
        answers, others = case(name, args)
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

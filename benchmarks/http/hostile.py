"""The cost of one hostile client for the others: inter-token latency of honest streams, with each case and alone.

    python -m benchmarks.http.hostile [--url http://127.0.0.1:8000] [--seconds 10] [--cases "slow masks" ...]

Without a URL it serves the embedded model itself. Streams and attack run in separate processes. One client sends each
case repeatedly, while eight streams run. Between two cases the streams run alone. ``worst`` is the longest of all gaps;
its limit is three times the p99 alone, plus 20 ms. At the end, a schema of one field is sent alone, and while 60 forms
that take seconds each are compiled: ``answered`` is the time of its whole answer, whose limit is 1 s.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.http.serving import first_model, sse
from benchmarks.rows import Report, parser, quantile
from tests.serving import ARGS, Server, free_port, serve_file

STREAMS, HEAVY = 8, 60
UNITS = {"p50": "ms", "p99": "ms", "worst": "ms", "limit": "ms", "tokens/s": "", "sent": "", "answered": "ms"}
SMALL_LIMIT_MS = 1000.0


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def _chain(rules: int, last: str = "b") -> str:
    lines = [f"r{i} ::= [a] r{i + 1}" for i in range(rules)]
    return "\n".join(["root ::= r0", *lines, f"r{rules} ::= [{last}]"])


def _form(**spec: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 200, "structured_outputs": spec}


def _tool(number: int) -> dict[str, Any]:
    function = {"name": f"f{number}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    return {"type": "function", "function": function}


_SMALL = _form(json={"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]})
_LITERAL = "a" * 4000
_SLOW = "start: A\nA: " + " ".join([f'"{_LITERAL}"'] * 10)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a constant of 4,000 characters": ("/v1/chat/completions", _form(json={"const": _LITERAL})),
    "slow masks": ("/v1/chat/completions", _form(grammar=_SLOW)),
    "600 properties": ("/v1/chat/completions", _form(json=_wide(600))),
    "2,000 properties": ("/v1/chat/completions", _form(json=_wide(2000))),
    "1,900 rules": ("/v1/chat/completions", _form(grammar=_chain(1900))),
    "a text of 4 M digits to tokenize": ("/tokenize", {"prompt": "7" * 4_000_000}),
    "3,001 messages to render": ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 3001}),
    "a prompt of 1 M characters": ("/v1/completions", {"prompt": "a b " * 250_000, "max_tokens": 1}),
    "8 answers, echo": ("/v1/completions", {"prompt": "a b " * 200, "max_tokens": 100, "n": 8, "echo": True}),
    "64 answers with 20 logprobs": ("/v1/completions", {"prompt": "a b", "max_tokens": 100, "n": 64, "logprobs": 20}),
    "20 logprobs of 1,500 prompt tokens": (
        "/v1/completions", {"prompt": "a b " * 750, "max_tokens": 1, "prompt_logprobs": 20}),
    "1,024 biases, 4 stops, 128 bad words": (
        "/v1/completions", {"prompt": "a b", "max_tokens": 200, "n": 8, "stop": ["x" * 2000] * 4,
                            "bad_words": ["y"] * 128, "logit_bias": {str(i): -1 for i in range(100, 1124)}}),
    "128 tools": ("/v1/chat/completions", {"messages": _form()["messages"], "max_tokens": 50,
                                           "tools": [_tool(i) for i in range(128)]}),
    "2,048 inputs to embed": ("/v1/embeddings", {"input": [f"{i} a b c" for i in range(2048)]}),
    "1,024 documents to rerank": ("/rerank", {"query": "a", "documents": [f"{i} a b c" for i in range(1024)]}),
}  # fmt: skip


def attack(
    url: str, model: str, case: str, begun: Event, stop: Event, told: multiprocessing.Queue[dict[int, int]]
) -> None:
    """Send the case from ``begun`` until ``stop``. Puts the count of each status into ``told``."""
    path, body = CASES[case]
    data, statuses = json.dumps({"model": model} | body), Counter[int]()
    begun.set()
    while not stop.is_set():
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        statuses[response.status] += 1
        connection.close()
        if response.status == 429:
            time.sleep(int(response.headers.get("Retry-After", "1")))
    told.put(dict(statuses))


async def streams(url: str, seconds: float) -> list[float]:
    """The seconds between tokens of eight streams that run for ``seconds``."""
    gaps: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        model, until = await first_model(session, url), time.perf_counter() + seconds

        async def one(place: int) -> None:
            limits = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
            body = {"model": model, "prompt": f"{place} stones lie in the garden", **limits}
            while time.perf_counter() < until:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    if response.status != 200:
                        raise RuntimeError(f"an honest stream was answered {response.status}")
                    came = [time.perf_counter() async for _ in sse(response)]
                gaps.extend(after - before for before, after in pairwise(came))

        await asyncio.gather(*(one(place) for place in range(STREAMS)))
    return gaps


def measured(url: str, seconds: float) -> dict[str, float]:
    gaps = asyncio.run(streams(url, seconds))
    found = {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99), "worst": max(gaps)}
    return {name: 1e3 * value for name, value in found.items()} | {"tokens/s": STREAMS * len(gaps) / sum(gaps)}


async def small_form(url: str, model: str, heavy: int) -> float:
    """Milliseconds to the answer for a schema of one field, while ``heavy`` schemas are compiled."""
    timeout, connections = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connections) as session:

        async def ask(body: dict[str, Any]) -> int:
            async with session.post("/v1/chat/completions", json={"model": model, "temperature": 0} | body) as response:
                await response.read()
                return response.status

        others = [asyncio.create_task(ask(_form(grammar=_chain(1900, f"b{i}")))) for i in range(heavy)]
        await asyncio.sleep(0.5)
        begun = time.perf_counter()
        if (status := await ask(_SMALL)) != 200:
            raise RuntimeError(f"a schema of one field was answered {status}")
        seconds = time.perf_counter() - begun
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return 1e3 * seconds


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """``url``, or the URL of a new server."""
    if url is not None:
        yield url
        return
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(serve_file(Path(folder) / "serve.yaml", port, ARGS), port) as own,
    ):
        yield own.url


async def _model(url: str) -> str:
    async with aiohttp.ClientSession() as session:
        return await first_model(session, url)


def beside(url: str, seconds: float, cases: list[str], report: Report) -> int:
    """The number of cases beyond their limit."""
    context, beyond, model = multiprocessing.get_context("spawn"), 0, asyncio.run(_model(url))
    measured(url, 2.0)
    for case in cases:
        alone = measured(url, seconds)
        report.add("alone", alone)
        begun, stop, told = context.Event(), context.Event(), context.Queue()
        attacker = context.Process(target=attack, args=(url, model, case, begun, stop, told))
        attacker.start()
        begun.wait()
        found = measured(url, seconds)
        stop.set()
        statuses = told.get(timeout=180)
        attacker.join()
        limit = 3 * alone["p99"] + 20
        beyond += found["p99"] > limit
        report.add(case, found | {"limit": limit, "sent": sum(statuses.values())}, f"statuses {statuses}")
    for heavy in (0, HEAVY):
        answered = asyncio.run(small_form(url, model, heavy))
        beyond += answered > SMALL_LIMIT_MS
        report.add(f"one field beside {heavy} heavy forms", {"answered": answered, "limit": SMALL_LIMIT_MS})
    return beyond


def main() -> int:
    """The exit status is 1 if a case is beyond its limit."""
    options = parser(__doc__)
    options.add_argument("--url")
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = options.parse_args()
    with server(args.url) as url:
        return int(beside(url, args.seconds, args.cases, Report("hostile", UNITS, args.out)) > 0)


if __name__ == "__main__":
    sys.exit(main())

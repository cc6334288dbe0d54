"""Send a server far more requests at once than its queue takes. Each must get the right answer, or 429.

    python -m benchmarks.http.flood --url http://127.0.0.1:8000 --requests 1000 [--floods 20]

Half of the requests stream. A 200 is right if its text is the same as that of its prompt alone, before the flood
(temperature 0). A stream that began before the flood measures the gaps between its events. Meanwhile a second process
requests /health every 5 ms and records the longest wait. A third process does the same with a server that has no other
work. The waits of these two processes show the delay by the machine itself.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import aiohttp

from benchmarks.http.serving import first_model, sse
from benchmarks.rows import Report, parser, quantile

PROMPTS = 32
_PAUSE_S = 0.005
UNITS = {
    "answered": "", "wrong": "", "time": "s", "TTFT p50": "ms", "TTFT p99": "ms",
    "gap p99": "ms", "gap longest": "ms",
    "/health p99": "ms", "/health longest": "ms", "floor p99": "ms", "floor longest": "ms",
}  # fmt: skip


@dataclass
class Outcome:
    """One request: its status, whether a 200 was right, seconds to its first token, Retry-After seconds."""

    status: int
    right: bool = True
    ttft: float = 0.0
    retry_after: int = 0


class Flood:
    """Sends completions of a few prompts to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, max_tokens: int) -> None:
        self._session, self._url, self._model, self._max_tokens = session, url, model, max_tokens
        self._wanted: list[str] = []

    async def learn(self) -> None:
        """Get the right answer to each prompt, one at a time."""
        for place in range(PROMPTS):
            async with self._session.post(f"{self._url}/v1/completions", json=self._body(place, False)) as response:
                self._wanted.append((await response.json())["choices"][0]["text"])

    async def ask(self, place: int) -> Outcome:
        begun, stream = time.perf_counter(), place % 2 == 0
        async with self._session.post(f"{self._url}/v1/completions", json=self._body(place, stream)) as response:
            if response.status != 200:
                envelope = set((await response.json())["error"]) == {"message", "type", "param", "code"}
                return Outcome(response.status, envelope, 0.0, int(response.headers.get("retry-after", 0)))
            if not stream:
                text = (await response.json())["choices"][0]["text"]
                return Outcome(200, text == self._wanted[place % PROMPTS])
            ttft, text = 0.0, ""
            async for event in sse(response):
                ttft = ttft or time.perf_counter() - begun
                text += event["choices"][0]["text"]
            return Outcome(200, text == self._wanted[place % PROMPTS], ttft)

    def _body(self, place: int, stream: bool) -> dict[str, object]:
        prompt = f"{place % PROMPTS} stones lie in the garden by the river, and the paper says:"
        limits = {"max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self._model, "prompt": prompt, "stream": stream} | limits


Probe = tuple[int, float]  # status, seconds


def watch_health(url: str, stop: Event, waits: multiprocessing.Queue[list[Probe]]) -> None:
    """Ask /health every 5 ms. At the end put (status, seconds) of each answer into ``waits``."""
    os.setsid()  # otherwise Linux schedules this process as a part of the flood (autogroups)
    found: list[Probe] = []
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    while not found or not stop.is_set():
        begun = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        found.append((response.status, time.perf_counter() - begun))
        time.sleep(_PAUSE_S)
    waits.put(found)


def serve_floor(ports: multiprocessing.Queue[int]) -> None:
    """Answer the requests of one connection with 200 until it is closed. Puts the port into ``ports``."""
    os.setsid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports.put(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while connection.recv(65536):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


@asynccontextmanager
async def running_stream(url: str, model: str) -> AsyncIterator[list[float]]:
    """The seconds between the events of one stream, which has begun and continues to the end of the context."""
    gaps: list[float] = []
    has_begun = asyncio.Event()
    body = {"model": model, "prompt": "Once", "stream": True, "max_tokens": 7000, "ignore_eos": True}

    async def read() -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
            session.post(f"{url}/v1/completions", json=body) as response,
        ):
            last = time.perf_counter()
            async for _ in sse(response):
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                has_begun.set()

    reading = asyncio.create_task(read())
    await has_begun.wait()
    gaps.clear()
    yield gaps
    if reading.done():
        raise RuntimeError("The stream ended before the flood.")
    reading.cancel()
    await asyncio.wait([reading])


async def flood(url: str, total: int, max_tokens: int) -> tuple[list[Outcome], float, list[float]]:
    """All outcomes, the seconds to the last outcome, and the seconds between events of a stream."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        model = await first_model(session, url)
        asking = Flood(session, url, model, max_tokens)
        await asking.learn()
        async with running_stream(url, model) as gaps:
            begun = time.perf_counter()
            outcomes = await asyncio.gather(*(asking.ask(place) for place in range(total)))
            return outcomes, time.perf_counter() - begun, gaps


def report(
    outcomes: Sequence[Outcome],
    seconds: float,
    gaps: Sequence[float],
    probes: Sequence[Probe],
    floor: Sequence[Probe],
    to: Report,
) -> bool:
    """Print the figures. Returns whether all statuses were 200 or 429, all 200 were right, and every probe got 200."""
    waits, healths = [wait for _, wait in probes], Counter(status for status, _ in probes)
    statuses = Counter(outcome.status for outcome in outcomes)
    wrong = sum(not outcome.right for outcome in outcomes)
    ttfts = [outcome.ttft for outcome in outcomes if outcome.ttft]
    figures = {
        "answered": statuses[200],
        "wrong": wrong,
        "time": seconds,
        "TTFT p50": 1e3 * quantile(ttfts, 0.5),
        "TTFT p99": 1e3 * quantile(ttfts, 0.99),
        "gap p99": 1e3 * quantile(gaps, 0.99),
        "gap longest": 1e3 * max(gaps),
        "/health p99": 1e3 * quantile(waits, 0.99),
        "/health longest": 1e3 * max(waits),
        "floor p99": 1e3 * quantile([wait for _, wait in floor], 0.99),
        "floor longest": 1e3 * max(wait for _, wait in floor),
    }
    retries = Counter(outcome.retry_after for outcome in outcomes if outcome.status == 429)
    print(f"statuses {dict(statuses)}, Retry-After {dict(retries)}, /health {dict(healths)}")
    to.add(f"{len(outcomes)} requests", figures)
    return set(statuses) <= {200, 429} and not wrong and set(healths) == {200}


def main() -> int:
    """The exit status is 1 if an answer was wrong or had another status than 200 and 429."""
    options = parser(__doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--floods", type=int, default=1, help="one after the other")
    args = options.parse_args()
    to = Report("flood", UNITS, args.out)
    return 0 if all(measured(args.url, args.requests, args.max_tokens, to) for _ in range(args.floods)) else 1


def measured(url: str, requests: int, max_tokens: int, to: Report) -> bool:
    """Run one flood with its probes. Returns whether every answer was as expected."""
    context = multiprocessing.get_context("spawn")
    stop, ports = context.Event(), context.Queue()
    server = context.Process(target=serve_floor, args=(ports,))
    server.start()
    asked = {address: context.Queue() for address in (url, f"http://127.0.0.1:{ports.get(timeout=60)}")}
    watchers = [context.Process(target=watch_health, args=(at, stop, waits)) for at, waits in asked.items()]
    for watcher in watchers:
        watcher.start()
    try:
        outcomes, seconds, gaps = asyncio.run(flood(url, requests, max_tokens))
    finally:
        stop.set()
    probes, floor = (waits.get(timeout=60) for waits in asked.values())
    for process in (*watchers, server):
        process.join()
    return report(outcomes, seconds, gaps, probes, floor, to)


if __name__ == "__main__":
    sys.exit(main())

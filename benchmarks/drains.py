"""Engines that come and go under streams, and from none at all: how long drains and starts take, and what clients see.

    python -m benchmarks.drains [--times 10] [--streams 16] [--tokens 2000] [--starts 3]

Streams of sampled answers run while the number of engines goes from 2 to 1 and back, again and again; new ones begin
where some have ended. Each text is compared with that of an undisturbed run. A drain takes from when Serve calls the
engine STOPPING to when it is gone; a silence is the longest time without a token of any stream while engines changed.

Then the number of engines goes by the load, from none: a start is the time from STARTING to RUNNING, an answer that
from the request to the status 200 and to the first token. Serve's states are looked at every 50 ms.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path

import httpx

from benchmarks.rows import Report, parser
from tests.serving import chat, text_of
from tests.updating import Updates, updated_server

UNITS = {"drain": "s", "silence": "s", "streams": "", "different": "", "others restarted": ""}
STARTS = {"engine's start": "s", "status 200": "s", "first token": "s"}
LOOK_S = 0.05
INGRESS = {"shutdown_grace_s": 120}


class States:
    """When each engine was first and last seen in each of Serve's states."""

    def __init__(self, updates: Updates) -> None:
        self.first: dict[tuple[str, str], float] = {}
        self.last: dict[str, float] = {}
        self._updates = updates

    def look(self) -> None:
        now = time.monotonic()
        for engine, state in self._updates.replicas("Engine").items():
            self.first.setdefault((engine, state), now)
            self.last[engine] = now

    @property
    def drains(self) -> list[float]:
        return [self.last[engine] - at for (engine, state), at in self.first.items() if state == "STOPPING"]

    @property
    def starts(self) -> list[float]:
        began = {engine: at for (engine, state), at in self.first.items() if state == "STARTING"}
        return [
            at - began[engine] for (engine, state), at in self.first.items() if state == "RUNNING" and engine in began
        ]


@contextmanager
def watched(updates: Updates) -> Iterator[States]:
    states, over = States(updates), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            states.look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield states
    finally:
        over.set()
        looking.join()


class Streams:
    """``number`` streams at any time, each with a text of its own that it must have; ``times`` are those of tokens."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        self._url, self._number, self._tokens = url, number, tokens
        self._right: list[str] = []
        self.times: dict[int, list[float]] = {}
        self.read = self.different = 0
        self.over = False

    async def undisturbed(self) -> None:
        self._right = await asyncio.gather(*(self._read(number) for number in range(self._number)))

    async def run(self) -> None:
        await asyncio.gather(*(self._again(number) for number in range(self._number)))

    async def _again(self, number: int) -> None:
        while not self.over:
            found = await self._read(number)
            self.read += 1
            if found != self._right[number]:
                self.different += 1
                print(f"stream {number}: {found[-300:]!r} for {self._right[number][-300:]!r}", flush=True)

    async def _read(self, number: int) -> str:
        body = chat(f"Count from {number}.", stream=True, ignore_eos=True, max_tokens=self._tokens)
        body |= {"temperature": 0.9, "seed": number}
        found, times = "", self.times.setdefault(number, [])
        try:
            async with (
                httpx.AsyncClient(timeout=300) as client,
                client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    if answer.status_code != 200 or '"error"' in line:
                        return f"{answer.status_code} {line}"
                    if text := text_of(line):
                        found += text
                        times.append(time.monotonic())
        except httpx.HTTPError as error:
            return repr(error)
        return found

    def silence(self, begin: float, end: float) -> float:
        """The longest between two tokens of one stream, of which one lies in that time."""
        pairs = chain.from_iterable(map(pairwise, self.times.values()))
        return max((after - before for before, after in pairs if after > begin and before < end), default=0.0)


async def drains(folder: Path, given: Namespace, report: Report) -> None:
    path = folder / "drains.yaml"
    with updated_server(path, engines=2, ingress=INGRESS, engine={"threads": 1}) as updates:
        streams = Streams(updates.server.url, given.streams, given.tokens)
        await streams.undisturbed()
        others = {
            name: set(updates.server.processes(name)) for name in ("ServeReplica:default:Ingress", "ServeController")
        }
        running = asyncio.create_task(streams.run())
        await asyncio.sleep(1)
        for time_ in range(1, given.times + 1):
            began, before = time.monotonic(), streams.different
            with watched(updates) as states:
                await asyncio.to_thread(updates.set_engines, 1)
                await asyncio.to_thread(updates.set_engines, 2)
            restarted = sum(set(updates.server.processes(name)) != pids for name, pids in others.items())
            figures = {"drain": max(states.drains), "silence": streams.silence(began, time.monotonic())}
            figures |= {"streams": streams.read, "different": streams.different - before, "others restarted": restarted}
            report.add(f"2 -> 1 -> 2, time {time_}", figures)
        before, streams.over = streams.different, True
        await running
        report.add("until all had ended", {"streams": streams.read, "different": streams.different - before})


async def starts(folder: Path, given: Namespace, report: Report) -> None:
    engine = {"replicas": {"min": 0, "max": 1, "downscale_delay_s": 2}, "threads": 1}
    with updated_server(folder / "starts.yaml", engines=0, ingress=INGRESS, engine=engine) as updates:
        for number in range(1, given.starts + 1):
            await asyncio.to_thread(updates.wait, lambda: not updates.replicas("Engine"), "keeps its engine")
            with watched(updates) as states:
                status, first = await asked(updates.server.url)
            report.add(f"from none, time {number}", {"engine's start": max(states.starts), **status, **first})


async def asked(url: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds to the status and to the first token; whole answers have their status when they are there."""
    began = time.monotonic()
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=chat("Hi", stream=True, max_tokens=4)) as answer,
    ):
        status = time.monotonic() - began
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if text_of(line):
                return {"status 200": status}, {"first token": time.monotonic() - began}
    raise AssertionError("there was no token")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--times", type=int, default=10)
    options.add_argument("--streams", type=int, default=16)
    options.add_argument("--tokens", type=int, default=2000)
    options.add_argument("--starts", type=int, default=3)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.times:
            asyncio.run(drains(Path(folder), given, Report("drains", UNITS, given.out)))
        if given.starts:
            asyncio.run(starts(Path(folder), given, Report("starts", STARTS, given.out)))


if __name__ == "__main__":
    main()

"""Remove one of two engines and add it again, repeatedly and under streams, and compare every text.

    python -m benchmarks.drains [--streams 16] [--tokens 2000] [--times 10]

Each stream is read once on undisturbed engines, which gives the expected texts. Then every client reads its stream
repeatedly, while the number of engines changes from 2 to 1 and back, as with `serve deploy`. A drain lasts from the
call that removes an engine until the processes of the engine are gone. "Restarted" are all other processes of the
server that end or begin during the drain: actors and HAProxy.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.asking import Asked, Question, WrongError, ask, open_client
from benchmarks.rows import Report, parser, quantile
from tests.serving import title
from tests.updating import Updates, updated_server

UNITS = {"drains": "", "streams": "", "different": "", "errors": "", "restarted": ""}
UNITS |= {"drain p50": "s", "longest drain": "s", "longest silence": "s"}
ENGINE = ("ServeReplica:default:Engine", "EngineCoreActor", "WorkerActor")
GRACE_S = 60.0


@dataclass
class Streams:
    """Clients that read the same streams repeatedly, and the errors in their texts."""

    client: aiohttp.ClientSession
    url: str
    questions: list[Question]
    right: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest_silence_s: float = 0.0

    async def read_once(self) -> None:
        asked = [Asked(question, [time.monotonic()]) for question in self.questions]
        await asyncio.gather(*(ask(self.client, self.url, one) for one in asked))
        self.right = [one.answer for one in asked]

    async def read_on(self, number: int) -> None:
        while True:
            asked = Asked(self.questions[number], [time.monotonic()])
            try:
                await ask(self.client, self.url, asked)
                different = asked.answer != self.right[number]
            except WrongError as error:
                self._note("errors", f"stream {number}: {error}")
            else:
                self.counts["streams"] += 1
                self.longest_silence_s = max([self.longest_silence_s, *asked.gaps])
                if different:
                    self._note("different", f"stream {number}: {asked.answer} for {self.right[number]}")

    def _note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        print(f"{kind}: {text[:300]}", flush=True)


def actors(updates: Updates) -> dict[int, str]:
    """The server's processes that must keep running, by pid: actors and HAProxy, without Ray's processes for tasks."""
    titles = {pid: title(pid) for pid in updates.server.processes()}
    named = {pid: re.match(r"ray::([\w:]+)|.*(haproxy)", text) for pid, text in titles.items()}
    return {
        pid: found[1] or found[2]
        for pid, found in named.items()
        if found is not None and not (found[1] or "").startswith("IDLE")
    }


def others(before: dict[int, str], after: dict[int, str]) -> list[str]:
    """Processes that ended or began, except those of one engine."""
    changed = {**before, **after}
    names = Counter(changed[pid] for pid in before.keys() ^ after.keys())
    for part in ENGINE:
        names.subtract({name: 1 for name in names if name.startswith(part)})
    return [*names.elements()]


def cycle(updates: Updates) -> tuple[float, list[str]]:
    """Go from two engines to one and back. Returns the seconds of the drain, and the other processes that changed."""
    two = actors(updates)

    def is_gone() -> bool:
        gone = [two[pid] for pid in two.keys() - actors(updates).keys()]
        return all(any(name.startswith(part) for name in gone) for part in ENGINE)

    since = time.monotonic()
    updates.ask_for_replicas(1)
    updates.wait(is_gone, "keeps its engine")
    seconds = time.monotonic() - since
    updates.set_engines(1)
    one = actors(updates)
    updates.set_engines(2)
    return seconds, others(two, one) + others(one, actors(updates))


async def measure(updates: Updates, questions: list[Question], times: int) -> dict[str, float]:
    async with open_client() as client:
        return await _measure(updates, Streams(client, updates.server.url, questions), times)


async def _measure(updates: Updates, streams: Streams, times: int) -> dict[str, float]:
    await asyncio.to_thread(updates.set_engines, 2)  # imports Serve now, which would take a minute beside many streams
    await streams.read_once()
    seconds, changed = [], []
    readers = [asyncio.create_task(streams.read_on(number)) for number in range(len(streams.questions))]
    try:
        for number in range(times):
            lasted, restarted = await asyncio.to_thread(cycle, updates)
            named = ", ".join(restarted) or "none"
            print(f"drain {number}: {lasted:.2f} s; other processes that ended or began: {named}", flush=True)
            seconds.append(lasted)
            changed += restarted
        whole = streams.counts["streams"] + len(readers)
        while streams.counts["streams"] + streams.counts["errors"] < whole:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    finally:
        for reader in readers:
            reader.cancel()
    found = {name: float(streams.counts[name]) for name in ("streams", "different", "errors")}
    found |= {"drains": len(seconds), "restarted": len(changed), "longest silence": streams.longest_silence_s}
    return found | {"drain p50": quantile(seconds, 0.5), "longest drain": max(seconds)}


def question(number: int, tokens: int) -> Question:
    asked = [{"role": "user", "content": f"Count from {number} to {number + 9}."}]
    fields = {"stream": True, "ignore_eos": True, "max_tokens": tokens, "temperature": 0.9, "seed": number}
    return Question(f"{number}", "/v1/chat/completions", {"model": "embedded", "messages": asked} | fields)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=16)
    options.add_argument("--tokens", type=int, default=2000)
    options.add_argument("--times", type=int, default=10)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = {"engine": {"threads": 1}, "ingress": {"shutdown_grace_s": GRACE_S}}
        with updated_server(Path(folder) / "serve.yaml", engines=2, **args) as updates:
            questions = [question(number, given.tokens) for number in range(given.streams)]
            try:
                figures = asyncio.run(measure(updates, questions, given.times))
            finally:
                said = updates.server.log.read_text().splitlines()
                print("\n".join(line for line in said if " lost " in line) or "no engine was lost", flush=True)
    case = f"{given.streams} streams of {given.tokens:,} tokens, 2 engines to 1 and back, {given.times} times"
    Report("drains", UNITS, given.out).add(case, figures)


if __name__ == "__main__":
    main()

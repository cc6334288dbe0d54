"""Load any OpenAI-compatible server and say what its clients see: TTFT, inter-token latency, tokens per second.

    python -m benchmarks.http.serving --concurrency 1 8 32                 # closed loop: so many always in flight
    python -m benchmarks.http.serving --rate 2 4 8                         # open loop: Poisson arrivals per second
    python -m benchmarks.http.serving --url http://host:port --model NAME --out serving.jsonl

Every request streams, asks for exactly --max-tokens tokens (ignore_eos) at temperature 0, and has a prompt of its own
of about --prompt-tokens tokens, so that prefix caches do not help. TTFT is up to the first chunk with text; the
inter-token latency of a request is (last chunk - first chunk) / (tokens - 1), tokens counted by the server's usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import aiohttp
from tqdm import tqdm

from benchmarks.rows import Report, parser, quantile

UNITS = {
    "requests": "", "errors": "", "output": "tok/s", "prompts and output": "tok/s",
    "TTFT p50": "ms", "TTFT p99": "ms", "ITL p50": "ms", "ITL p99": "ms",
}  # fmt: skip
WORDS = "apple river stone cloud seven green music paper light ocean table horse winter garden silver bridge".split()  # noqa: SIM905


@dataclass
class Answer:
    """One request as its client saw it, in seconds."""

    ttft: float = 0.0
    total: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    error: str | None = None

    @property
    def itl(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.total - self.ttft) / max(1, self.tokens - 1)


@dataclass
class Load:
    """The answers to one load, which took so many seconds."""

    seconds: float
    answers: list[Answer]

    @property
    def errors(self) -> list[str]:
        """What went wrong, one for each request that failed."""
        return [answer.error for answer in self.answers if answer.error]

    def figures(self) -> dict[str, float]:
        """By metric (see ``UNITS``); where every request failed, only the counts."""
        good = [answer for answer in self.answers if answer.error is None]
        found = {"requests": float(len(self.answers)), "errors": float(len(self.errors))}
        if good:
            found["output"] = sum(answer.tokens for answer in good) / self.seconds
            found["prompts and output"] = sum(answer.tokens + answer.prompt_tokens for answer in good) / self.seconds
            for name, times in (("TTFT", [answer.ttft for answer in good]), ("ITL", [answer.itl for answer in good])):
                found |= {f"{name} p50": 1e3 * quantile(times, 0.5), f"{name} p99": 1e3 * quantile(times, 0.99)}
        return found


class Client:
    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.session, self.url, self.model = session, url, model
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.random = random.Random(0)

    def body(self) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": " ".join(self.random.choices(WORDS, k=self.prompt_tokens)),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self) -> Answer:
        """One request; an error stands in its answer."""
        answer, start = Answer(), time.perf_counter()
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=self.body()) as response:
                if response.status != 200:
                    answer.error = f"{response.status} {(await response.text())[:200]}"
                    return answer
                await self._read(response, answer, start)
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = repr(error)
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, start: float) -> None:
        async for event in sse(response):
            if "error" in event:
                answer.error = str(event["error"])
            if event.get("choices") and event["choices"][0].get("text"):
                answer.total = time.perf_counter() - start
                answer.ttft = answer.ttft or answer.total
                answer.chunks += 1
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
                answer.tokens = event["usage"]["completion_tokens"]
        if answer.error is None and answer.tokens != self.max_tokens:
            answer.error = f"{answer.tokens} tokens instead of {self.max_tokens}"


async def sse(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """The JSON events of a server-sent event stream up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


async def closed_loop(ask: Callable[[], Awaitable[Answer]], concurrency: int, total: int) -> list[Answer]:
    """Keep ``concurrency`` requests in flight until ``total`` are done."""
    answers: list[Answer] = []
    todo = iter(range(total))

    async def one_after_another() -> None:
        for _ in todo:
            answers.append(await ask())
            bar.update()

    with tqdm(total=total, desc=f"concurrency {concurrency}", leave=False) as bar:
        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return answers


async def open_loop(ask: Callable[[], Awaitable[Answer]], rate: float, total: int) -> list[Answer]:
    """Send ``total`` requests at Poisson arrivals of ``rate`` per second, however many are still open."""
    gaps = random.Random(1)

    async def counted() -> Answer:
        answer = await ask()
        bar.update()
        return answer

    with tqdm(total=total, desc=f"rate {rate:g}/s", leave=False) as bar:
        tasks = []
        for _ in range(total):
            tasks.append(asyncio.ensure_future(counted()))
            await asyncio.sleep(gaps.expovariate(rate))
        return list(await asyncio.gather(*tasks))


async def run(args: argparse.Namespace) -> list[Load]:
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        model = args.model or await first_model(session, args.url)
        client = Client(session, args.url, model, args.prompt_tokens, args.max_tokens)
        await asyncio.gather(*(client.ask() for _ in range(4)))  # warm-up
        report, loads = Report("serving", UNITS, args.out), []
        if args.rate:
            runs = {
                f"rate {rate:g}/s": partial(open_loop, client.ask, rate, args.requests or max(8, int(20 * rate)))
                for rate in args.rate
            }
        else:
            runs = {
                f"concurrency {clients}": partial(
                    closed_loop, client.ask, clients, args.requests or max(4, 3 * clients)
                )
                for clients in args.concurrency
            }
        for name, run_load in runs.items():
            start = time.perf_counter()
            answers = await run_load()
            loads.append(Load(time.perf_counter() - start, answers))
            report.add(name, loads[-1].figures())
            for error in list(dict.fromkeys(loads[-1].errors))[:3]:
                print(f"    {error}", file=sys.stderr)
        return loads


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def main() -> int:
    """Run the loads; the exit status is 1 when any request failed."""
    options = parser(__doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model", help="by default the first one that the server lists")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--rate", type=float, nargs="+", default=[])
    options.add_argument(
        "--requests", type=int, help="requests per load; by default 3 x concurrency or 20 s of arrivals"
    )
    options.add_argument("--prompt-tokens", type=int, default=128)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--timeout", type=float, default=600.0)
    args = options.parse_args()
    return int(any(load.errors for load in asyncio.run(run(args))))


if __name__ == "__main__":
    sys.exit(main())

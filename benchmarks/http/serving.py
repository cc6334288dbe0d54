"""Load any OpenAI-compatible server and measure its clients' TTFT, inter-token latency and tokens per second.

    python -m benchmarks.http.serving --concurrency 1 8 32                 # closed loop: so many always in flight
    python -m benchmarks.http.serving --rate 2 4 8                         # open loop: Poisson arrivals per second
    python -m benchmarks.http.serving --url http://host:port --model NAME --out serving.jsonl

Every request streams, and asks for exactly --max-tokens tokens (ignore_eos) at temperature 0. Each has a different
prompt of about --prompt-tokens tokens, so that prefix caches do not help. TTFT is the time to the first chunk with
text. The inter-token latency of a request is (last chunk - first chunk) / (tokens - 1), with the tokens in the server's
usage. The client and its measurements are those of `raylm bench`. This module adds rows, and changes for other
benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import aiohttp
from tqdm import tqdm

from benchmarks.rows import Report, parser, quantile
from raylm.bench import WORDS
from raylm.bench.loops import closed_loop as closed
from raylm.bench.loops import open_loop as opened
from raylm.bench.loops import poisson
from raylm.client import Answer, Connection, ask
from raylm.client import events as sse

__all__ = ["Answer", "Client", "Load", "closed_loop", "first_model", "open_loop", "sse"]
UNITS = {
    "requests": "", "errors": "", "output": "tok/s", "prompts and output": "tok/s",
    "TTFT p50": "ms", "TTFT p99": "ms", "ITL p50": "ms", "ITL p99": "ms",
}  # fmt: skip


@dataclass
class Load:
    """The answers to one load, and its seconds."""

    seconds: float
    answers: list[Answer]

    @property
    def errors(self) -> list[str]:
        """The errors of the failed requests."""
        return [answer.error for answer in self.answers if answer.error]

    def figures(self) -> dict[str, float]:
        """Figures by metric (see ``UNITS``). If every request failed, only the counts."""
        good = [answer for answer in self.answers if answer.error is None]
        found = {"requests": float(len(self.answers)), "errors": float(len(self.errors))}
        if good:
            found["output"] = sum(answer.tokens for answer in good) / self.seconds
            found["prompts and output"] = sum(answer.tokens + answer.prompt_tokens for answer in good) / self.seconds
            for name, times in (("TTFT", [answer.ttft for answer in good]), ("ITL", [answer.itl for answer in good])):
                found |= {f"{name} p50": 1e3 * quantile(times, 0.5), f"{name} p99": 1e3 * quantile(times, 0.99)}
        return found


class Client:
    """Sends completions of equal lengths. A prompt has as many words as the requested number of tokens."""

    def __init__(self, connection: Connection, model: str, prompt_tokens: int, max_tokens: int) -> None:
        self.connection, self.model = connection, model
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
        """Send one request. The answer contains the error, if any."""
        return await ask(self.connection, "/v1/completions", self.body(), self.max_tokens)


async def closed_loop(ask: Callable[[], Awaitable[Answer]], concurrency: int, total: int) -> list[Answer]:
    """Keep ``concurrency`` requests in flight until ``total`` are done."""
    with tqdm(total=total, desc=f"concurrency {concurrency}", leave=False) as bar:
        return await closed([ask] * total, concurrency, bar.update)


async def open_loop(ask: Callable[[], Awaitable[Answer]], rate: float, total: int) -> list[Answer]:
    """Send ``total`` requests with Poisson arrivals at ``rate`` per second, without waiting for answers."""
    with tqdm(total=total, desc=f"rate {rate:g}/s", leave=False) as bar:
        answers, _ = await opened([ask] * total, poisson(rate, total, 1), bar.update)
        return answers


async def run(args: argparse.Namespace) -> list[Load]:
    async with Connection(args.url, timeout_s=args.timeout) as connection:
        model = args.model or await connection.first_model()
        client = Client(connection, model, args.prompt_tokens, args.max_tokens)
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
    """Run the loads. The exit status is 1 if a request failed."""
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

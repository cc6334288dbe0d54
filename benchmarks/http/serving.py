"""Load any OpenAI-compatible server and say what its clients see: TTFT, inter-token latency, tokens per second.

    python -m benchmarks.http.serving --concurrency 1 8 32                 # closed loop: so many always in flight
    python -m benchmarks.http.serving --rate 2 4 8                         # open loop: Poisson arrivals per second
    python -m benchmarks.http.serving --url http://host:port --model NAME --plot serving.png --json serving.json

Every request streams, asks for exactly --max-tokens tokens (ignore_eos) at temperature 0, and has a prompt of its own
of about --prompt-tokens tokens, so that prefix caches do not help. TTFT is up to the first chunk with text; the
inter-token latency of a request is (last chunk - first chunk) / (tokens - 1), tokens counted by the server's usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from tqdm import tqdm

from benchmarks.pictures import picture

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
    """One row of the table."""

    label: str
    seconds: float
    answers: list[Answer] = field(repr=False)

    def row(self) -> dict[str, float | str]:
        """Figures of this load: seconds and tokens per second."""
        good = [a for a in self.answers if a.error is None]
        out = {"load": self.label, "requests": len(self.answers), "errors": len(self.answers) - len(good)}
        if good:
            out |= {
                "out_tok_s": sum(a.tokens for a in good) / self.seconds,
                "total_tok_s": sum(a.tokens + a.prompt_tokens for a in good) / self.seconds,
                "ttft_p50": quantile([a.ttft for a in good], 0.5),
                "ttft_p99": quantile([a.ttft for a in good], 0.99),
                "itl_p50": quantile([a.itl for a in good], 0.5),
                "itl_p99": quantile([a.itl for a in good], 0.99),
            }
        return out


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Client:
    """Sends streamed completions to one server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.session, self.url, self.model = session, url, model
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.random = random.Random(0)

    def body(self) -> dict[str, object]:
        """A request no server has seen before."""
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
        """One request, whatever becomes of it."""
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
    """All loads, one after the other."""
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        model = args.model or await first_model(session, args.url)
        client = Client(session, args.url, model, args.prompt_tokens, args.max_tokens)
        await asyncio.gather(*(client.ask() for _ in range(4)))  # warm-up
        loads = []
        for concurrency in args.concurrency if not args.rate else []:
            start = time.perf_counter()
            answers = await closed_loop(client.ask, concurrency, args.requests or max(4, 3 * concurrency))
            loads.append(Load(f"c={concurrency}", time.perf_counter() - start, answers))
        for rate in args.rate:
            start = time.perf_counter()
            answers = await open_loop(client.ask, rate, args.requests or max(8, int(20 * rate)))
            loads.append(Load(f"{rate:g}/s", time.perf_counter() - start, answers))
        return loads


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists."""
    async with session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def print_table(loads: list[Load]) -> None:
    """Milliseconds and tokens per second, one line a load; then the first errors."""
    print(
        f"{'load':>8} {'requests':>9} {'errors':>7} {'out tok/s':>10} "
        f"{'TTFT p50':>9} {'p99':>8} {'ITL p50':>8} {'p99':>8}  ms"
    )
    for load in loads:
        row = load.row()
        times = [f"{1e3 * row.get(k, float('nan')):8.1f}" for k in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")]
        print(
            f"{row['load']:>8} {row['requests']:>9} {row['errors']:>7} {row.get('out_tok_s', 0):>10.1f}  "
            f"{times[0]} {times[1]} {times[2]} {times[3]}"
        )
        for error in list(dict.fromkeys(a.error for a in load.answers if a.error))[:3]:
            print(f"         {error}", file=sys.stderr)


def plot(loads: list[Load], path: Path) -> None:
    """TTFT, inter-token latency and throughput of each load as three panels."""
    labels = [load.label for load in loads]
    with picture(path, 3, (13, 4)) as (rates, ttft, itl):
        rates.bar(labels, [load.row().get("out_tok_s", 0) for load in loads], color="#4477aa")
        rates.set_title("output tokens/s")
        for axis, name, title in ((ttft, "ttft", "time to first token, ms"), (itl, "itl", "inter-token latency, ms")):
            values = [[1e3 * getattr(a, name) for a in load.answers if a.error is None] for load in loads]
            axis.boxplot([v or [0] for v in values], tick_labels=labels, whis=(1, 99), showfliers=False)
            axis.set_title(f"{title} (median {statistics.median(values[-1] or [0]):.1f} at {labels[-1]})")
            axis.set_ylim(bottom=0)


def main() -> int:
    """Parse, run, print; the exit status is 1 when any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the first one that the server lists")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rate", type=float, nargs="+", default=[])
    parser.add_argument(
        "--requests", type=int, help="requests per load; by default 3 x concurrency or 20 s of arrivals"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    loads = asyncio.run(run(args))
    print_table(loads)
    if args.json:
        args.json.write_text(
            json.dumps([load.row() | {"answers": [asdict(a) for a in load.answers]} for load in loads])
        )
    if args.plot:
        plot(loads, args.plot)
    return int(any(answer.error for load in loads for answer in load.answers))


if __name__ == "__main__":
    sys.exit(main())

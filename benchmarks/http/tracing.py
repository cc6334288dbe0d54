"""The cost of spans and log lines for each request in an ingress: streams without a model, measured alternately.

``a request`` is CPU time of the event loop's thread. ``process`` is CPU time of the whole process, which makes and
sends the spans. The collector runs in another process. The rest of the stack is the same in all cases.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import orjson

from benchmarks.rows import Report, parser, quantile
from raylm.config import Config
from raylm.engine import EngineCore
from raylm.frontend import AsyncLLM, LocalEngineClient, open_observers
from raylm.ingress import build_asgi_app
from raylm.messages import EngineInfo
from tests.fakes import FakeExecutor, FakeModel, FakeWorker

COLLECTOR = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
PROMPT = "The scheduler decides what runs next, and the worker runs it. " * 4


def config(**ingress: Any) -> Config:
    cache = {"num_blocks": 4096, "block_size": 16}
    return Config.model_validate({"model": "embedded", "cache": cache, "max_model_len": 1024, "ingress": ingress})


class Stack:
    """An app over one engine without a model, with the observers set in ``config``."""

    def __init__(self, config: Config) -> None:
        self._core = EngineCore(config, FakeExecutor(FakeWorker(model=FakeModel(8000, 10**9, 10**12))))
        self._llm = AsyncLLM(config)
        self.app = build_asgi_app(self._llm, config)
        self._config = config

    async def start(self) -> None:
        info = await self._core.start()
        self._loop = asyncio.create_task(self._core.run())
        self._llm.add_engine(LocalEngineClient(self._core, EngineInfo("e", info.max_model_len, info)))
        self._llm.timelines.observers = open_observers(self._config, "bench", "ingress", self._llm.text_of)

    async def stop(self) -> int:
        """Returns the number of requests whose spans were not sent."""
        await self._llm.timelines.close(10)
        lost = sum(getattr(observer, "lost", 0) for observer in self._llm.timelines.observers)
        await self._llm.stop()
        self._loop.cancel()
        with suppress(asyncio.CancelledError):
            await self._loop
        return lost


async def ask(app: Any, tokens: int) -> int:
    """The number of events of one streamed completion."""
    body = orjson.dumps({"model": "embedded", "prompt": PROMPT, "max_tokens": tokens, "seed": 1, "stream": True})
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "",
        "query_string": b"", "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
        "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("127.0.0.1", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    sent, over, pending = 0, asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"").count(b"data: ")

    await app(scope, receive, send)
    over.set()
    return sent


async def turn(stack: Stack, streams: int, rounds: int, tokens: int) -> dict[str, float]:
    began, loop, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(rounds):
        await asyncio.gather(*(ask(stack.app, tokens) for _ in range(streams)))
    count = streams * rounds
    return {
        "rate": count * tokens / (time.perf_counter() - began),
        "a request": 1e3 * (time.thread_time() - loop) / count,
        "process": 1e3 * (time.process_time() - process) / count,
    }


async def measure(args: Any, url: str) -> tuple[dict[str, list[dict[str, float]]], dict[str, int]]:
    cases = {
        "neither": config(),
        "a line for each": config(slow_request_s=0),
        "spans": config(otlp_endpoint=url),
        "spans with content": config(otlp_endpoint=url, otlp_content=True),
    }
    stacks = {name: Stack(config) for name, config in cases.items()}
    for stack in stacks.values():
        await stack.start()
        await turn(stack, args.streams, 1, args.tokens)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in stacks}
    for number in range(args.turns):
        order = list(stacks.items())
        for name, stack in order if number % 2 else order[::-1]:
            found[name].append(await turn(stack, args.streams, args.rounds, args.tokens))
    return found, {name: await stack.stop() for name, stack in stacks.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--turns", type=int, default=10)
    args = options.parse_args()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None
        try:
            found, lost = asyncio.run(measure(args, f"http://127.0.0.1:{int(collector.stdout.readline())}"))
        finally:
            collector.terminate()
    units = {"rate": "tokens/s", "ratio": "x", "a request": "ms", "process": "ms", "lost": ""}
    report = Report("tracing", units, args.out)
    for name, turns in found.items():
        medians = {key: quantile([one[key] for one in turns], 0.5) for key in turns[0]}
        pairs = zip(turns, found["neither"], strict=True)
        ratio = quantile([one["rate"] / other["rate"] for one, other in pairs], 0.5)
        report.add(f"{args.streams} streams, {name}", medians | {"ratio": ratio, "lost": lost[name]})


if __name__ == "__main__":
    main()

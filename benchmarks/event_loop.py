"""The longest stretch for which one request keeps the event loop of an ingress replica from everybody else.

    python benchmarks/event_loop.py             # all cases
    python benchmarks/event_loop.py --only chat

The HTTP app and AsyncLLM are the real ones, with the embedded model's tokenizer and template and a context of 131,072
tokens; the engine answers at once with arbitrary tokens, so that what is measured is the front end's own work. A
heartbeat asks for its turn every millisecond; how late it gets it is what anybody else would have waited. curl, a
process of its own, sends the bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn

from raylm.config import Config
from raylm.frontend import AsyncLLM, EngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineStats,
    Logprobs,
    LoRAAdapter,
    WorkerInfo,
)

CONTEXT = 131_072
VOCABULARY = 3_000
BEAT_S = 0.001


class InstantEngine(EngineClient):
    """Answers every request with tokens 300, 301, … in steps of one token a sequence, as fast as they are read."""

    def __init__(self) -> None:
        worker = WorkerInfo(64, 16, CONTEXT, VOCABULARY, "cpu", "float32", "cpu", 1, 0, 0)
        self.info = EngineInfo("instant", CONTEXT, worker)
        self._steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def add(self, request: EngineCoreRequest) -> None:
        """Lay out all steps of the answer."""
        params, last = request.params, (request.params.max_tokens or 16) - 1
        for step in range(last + 1):
            self._steps.put_nowait(_step(request.key, params.n, step, step == last, params.logprobs))
            if step == 0 and params.prompt_logprobs is not None:
                self._steps._queue[-1].prompt_logprobs.append(  # type: ignore[attr-defined]
                    (request.key, _logprobs(len(request.prompt_token_ids) - 1, params.prompt_logprobs))
                )

    def abort(self, keys: list[int]) -> None:
        """There is nothing to stop."""

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """There is nothing to stop."""

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """There is no model."""

    async def unload_adapter(self, name: str) -> None:
        """There is no model."""

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """The steps."""
        while True:
            yield await self._steps.get()
            await asyncio.sleep(0)

    async def close(self) -> None:
        """There is nothing to leave."""


def _step(key: int, n: int, step: int, last: bool, num_logprobs: int | None) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        keys=[key] * n,
        indexes=list(range(n)),
        token_counts=[1] * n,
        token_ids=[300 + step % 2000] * n,
        finish_reasons=["length" if last else None] * n,
        stop_reasons=[None] * n,
        cached_tokens=[0] * n,
        stats=EngineStats(),
        logprobs=None if num_logprobs is None else _logprobs(n, num_logprobs),
    )


@cache
def _logprobs(count: int, top: int) -> Logprobs:
    width = top + 1
    return Logprobs([width] * count, list(range(300, 300 + width)) * count, [-1.5] * (width * count), [1] * count)


def cases() -> Iterator[tuple[str, str, Any]]:
    """(name, path, body) of what is sent; a body is JSON already where Python's own encoder would take too long."""
    chat: dict[str, Any] = {"model": "embedded"}
    text: dict[str, Any] = {"model": "embedded", "max_tokens": 1}

    def talk(content: Any, **fields: Any) -> dict[str, Any]:
        return chat | {"messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields

    words = "the quick brown fox jumps over a lazy dog and back "
    yield "chat: 300 kB of text", "/v1/chat/completions", talk(words * 6_000)
    yield "chat: 30 MB of text", "/v1/chat/completions", talk(words * 600_000)
    yield "chat: 30 MB of Chinese", "/v1/chat/completions", _raw(talk("@"), '"@"', '"' + "语言模型" * 2_500_000 + '"')
    yield (
        "chat: 600,000 messages",
        "/v1/chat/completions",
        chat | {"messages": [{"role": "user", "content": "a"}] * 600_000},
    )
    yield (
        "chat: 100,000 messages",
        "/v1/chat/completions",
        chat | {"messages": [{"role": "user", "content": "a"}] * 100_000},
    )
    yield (
        "chat: 8,000 messages",
        "/v1/chat/completions",
        chat | {"messages": [{"role": "user", "content": "a"}] * 8_000, "max_tokens": 2},
    )
    yield "chat: 100,000 text parts", "/v1/chat/completions", talk([{"type": "text", "text": "a"}] * 100_000)
    yield "chat: tools of 5 MB", "/v1/chat/completions", talk("a", tools=[_tool(3_000)] * 100)
    yield (
        "chat: kwargs of 500,000 values",
        "/v1/chat/completions",
        talk("a", chat_template_kwargs={"a": [1] * 500_000}),
    )
    yield (
        "chat: 128 choices of 200 tokens, 20 logprobs",
        "/v1/chat/completions",
        talk("a", n=128, max_tokens=200, logprobs=True, top_logprobs=20),
    )
    yield (
        "chat: the same streamed",
        "/v1/chat/completions",
        talk("a", n=128, max_tokens=200, logprobs=True, top_logprobs=20, stream=True),
    )
    yield "chat: 128 choices of 1,000 tokens", "/v1/chat/completions", talk("a", n=128, max_tokens=1_000)
    yield (
        "chat: 128 bad words of 2,048",
        "/v1/chat/completions",
        talk("a", bad_words=[f"{i} {words * 50}"[:2_048] for i in range(128)]),
    )
    yield "chat: 262,144 allowed ids", "/v1/chat/completions", talk("a", allowed_token_ids=[5] * 262_144)
    yield (
        "completions: 1,024 prompts of 8,000 characters",
        "/v1/completions",
        text | {"prompt": [(words * 160)[:8_000]] * 1_024},
    )
    yield (
        "completions: 1,024 prompts of 100 ids, n 4",
        "/v1/completions",
        text | {"prompt": [[5] * 100] * 1_024, "n": 4},
    )
    yield "completions: 500,000 ids in 500 prompts", "/v1/completions", text | {"prompt": [[5] * 1_000] * 500}
    yield (
        "completions: 15,000,000 ids",
        "/v1/completions",
        _raw(text | {"prompt": "@"}, '"@"', "[5" + ",5" * 14_999_999 + "]"),
    )
    yield (
        "completions: echo, 100,000 ids, 20 logprobs",
        "/v1/completions",
        text | {"prompt": [5] * 100_000, "echo": True, "logprobs": 20, "prompt_logprobs": 20},
    )
    yield "completions: 30 MB of text", "/v1/completions", text | {"prompt": words * 600_000}
    yield "tokenize: 4 MB", "/tokenize", {"prompt": words * 80_000}
    yield "tokenize: 4 MB, token_strs", "/tokenize", {"prompt": words * 80_000, "return_token_strs": True}
    yield "tokenize: 4 MB of digits", "/tokenize", {"prompt": "7" * 4_000_000}
    yield "detokenize: 500,000 ids", "/detokenize", {"tokens": [500] * 500_000}
    yield (
        "embeddings: 1,024 texts of 8,000 characters",
        "/v1/embeddings",
        {"model": "embedded", "input": [(words * 160)[:8_000]] * 1_024},
    )
    yield (
        "any: 2,000,000 unknown fields",
        "/v1/completions",
        "{" + ",".join(f'"f{i}":1' for i in range(2_000_000)) + "}",
    )
    yield (
        "any: 4,000,000 empty arrays",
        "/v1/completions",
        _raw(text | {"prompt": "@"}, '"@"', "[[]" + ",[]" * 4_000_000 + "]"),
    )


def _raw(body: dict[str, Any], mark: str, content: str) -> str:
    return json.dumps(body).replace(mark, content)


def _tool(properties: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties // 2)}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


class Heart:
    """Asks for its turn again and again, and notes how late it got it."""

    def __init__(self) -> None:
        self.latest = 0.0

    async def beat(self) -> None:
        """Runs until it is cancelled."""
        while True:
            wanted = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.latest = max(self.latest, time.perf_counter() - wanted)


async def send(url: str, path: Path) -> tuple[str, float]:
    """Send the body in a file by curl; its status and the seconds it took."""
    command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", "Expect:"]
    command += ["-H", "Content-Type: application/json", "--data-binary", f"@{path}", url]
    begun = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode(), time.perf_counter() - begun


async def run(only: str, rounds: int, report: Callable[[str], None]) -> float:
    """Send every case ``rounds`` times; the worst of all cases' best."""
    config = Config.model_validate({"model": "embedded", "max_model_len": CONTEXT})
    llm = AsyncLLM(config)
    llm.add_engine(InstantEngine())
    gc.collect()
    gc.freeze()  # as the ingress does
    server = uvicorn.Server(uvicorn.Config(build_asgi_app(llm, config), port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    worst, heart = 0.0, Heart()
    beating = asyncio.create_task(heart.beat())
    with tempfile.TemporaryDirectory() as folder:
        for name, route, body in cases():
            if only not in name:
                continue
            path = Path(folder) / "body"
            path.write_text(
                body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
            )
            del body
            lates = []
            for _ in range(rounds):
                await asyncio.sleep(0.3)
                heart.latest = 0.0
                status, seconds = await send(f"http://127.0.0.1:{port}{route}", path)
                lates.append(heart.latest)
            worst = max(worst, min(lates))
            size = path.stat().st_size / 1e6
            report(f"{name:48} {size:6.1f} MB  {status}  {seconds:6.2f} s  blocked {1e3 * min(lates):7.1f} ms")
    beating.cancel()
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await asyncio.gather(serving, beating)
    await llm.stop()
    return worst


def main() -> int:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is sent; the best one counts")
    args = parser.parse_args()
    worst = asyncio.run(run(args.only, args.rounds, lambda line: print(line, flush=True)))
    print(f"the longest: {1e3 * worst:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

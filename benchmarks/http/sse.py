"""Chunks per second of streaming: encoding a chunk, and the whole path from AsyncLLM to the server.

    python -m benchmarks.http.sse [--streams 64] [--tokens 500]

"plain" is the simplest code: a dict for each chunk, json.dumps, Starlette's StreamingResponse. "orjson" is the same
with orjson. "spliced" is RayLM's server: the constant part is encoded once per stream, the token's text is spliced into
it, and the bytes go to the server without another layer. It also counts usage, opens choices, checks their ends and
gives events their ids, which the other two do not do. The engine is a generator of ready tokens, so the figures are the
cost of HTTP alone, per second of CPU. Best of three rounds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.rows import Report, parser
from raylm.config import Config
from raylm.frontend import Admission, ChatPrompt, ChatRequest, CompletionDelta, RequestHead, RequestOutput, Timelines
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.ingress import build_asgi_app
from raylm.ingress.http.sse import ChunkTemplate
from raylm.params import SamplingParams

HEAD = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "org/model-8b"}
ROUNDS = 3


class ReadyLLM:
    """Yields ``tokens`` tokens without delay, and lets the other streams run after each."""

    sampling_defaults: dict[str, Any] = {}  # noqa: RUF012 - read only
    model_name, max_model_len, is_ready, fingerprint = "m", 1 << 20, True, "fp_0123456789abcdef"
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.admission, self.adapters, self.timelines = Admission(), AdapterDirectory(), Timelines()

    def token_bytes(self, token_id: int) -> bytes:
        """Not used here."""
        return b" token"

    async def prepare_chat(self, request: ChatRequest, params: SamplingParams) -> ChatPrompt:
        return ChatPrompt([1, 2, 3], params, None)

    async def generate(
        self, prompt: list[int], params: SamplingParams, head: RequestHead, answer_format: object = None
    ) -> AsyncGenerator[RequestOutput, None]:
        for number in range(self._tokens):
            await asyncio.sleep(0)
            last = number == self._tokens - 1
            delta = CompletionDelta(0, " token", [7], None, "length" if last else None)
            yield RequestOutput(head.request_id, prompt, [delta], finished=last)


def plain_app(llm: ReadyLLM, dumps: Callable[[Any], bytes]) -> Starlette:
    """The endpoint in its simplest form."""

    async def events(request_id: str) -> AsyncIterator[bytes]:
        async for output in llm.generate([1, 2, 3], SamplingParams(), RequestHead(request_id=request_id)):
            for delta in output.deltas:
                yield b"data: " + dumps(chunk_dict(delta.text, delta.finish_reason)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(events("r"), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def chunk_dict(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason}
    return {**HEAD, "choices": [choice]}


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


async def call(app: Starlette) -> int:
    """Run one streamed chat through ``app`` in this process. Returns the number of events."""
    body = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")], "http_version": "1.1", "scheme": "http",
        "server": ("x", 80), "client": ("x", 1), "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    sent, over = 0, asyncio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if pending:
            return pending.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"").count(b"data: ")

    await app(scope, receive, send)
    over.set()
    return sent


def path_rate(app: Starlette, streams: int) -> float:
    """Events per second over ``streams`` streams at once."""

    async def run() -> float:
        start = time.process_time()
        sent = sum(await asyncio.gather(*(call(app) for _ in range(streams))))
        return sent / (time.process_time() - start)

    return max(asyncio.run(run()) for _ in range(ROUNDS))


def encode_rate(encode: Callable[[str], bytes], count: int = 200_000) -> float:
    """Chunks per second of ``encode`` alone."""

    def once() -> float:
        start = time.process_time()
        for _ in range(count):
            encode(" token")
        return count / (time.process_time() - start)

    return max(once() for _ in range(ROUNDS))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--tokens", type=int, default=500)
    args = options.parse_args()
    template = ChunkTemplate(HEAD, "delta.content", null_usage=False)
    llm = ReadyLLM(args.tokens)
    encoders: dict[str, Callable[[str], bytes]] = {
        "plain": lambda text: b"data: " + json_bytes(chunk_dict(text, None)) + b"\n\n",
        "orjson": lambda text: b"data: " + orjson.dumps(chunk_dict(text, None)) + b"\n\n",
        "spliced": lambda text: template.text(0, text),
    }
    apps = {
        "plain": plain_app(llm, json_bytes),
        "orjson": plain_app(llm, orjson.dumps),
        "spliced": build_asgi_app(llm, Config()),  # type: ignore[arg-type]
    }
    report = Report("sse", {"rate": "chunks/s", "a chunk": "µs", "ratio": "x"}, args.out)
    for title, rates in (
        ("one chunk encoded", {name: encode_rate(encode) for name, encode in encoders.items()}),
        (f"whole path, {args.streams} streams", {name: path_rate(app, args.streams) for name, app in apps.items()}),
    ):
        for name, rate in rates.items():
            report.add(f"{title}, {name}", {"rate": rate, "a chunk": 1e6 / rate, "ratio": rate / rates["plain"]})


if __name__ == "__main__":
    main()

"""A stand-in for an OpenAI-compatible server: a word is a token, requests are recorded, faults happen on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.ingress.harness import served

WARM_UP = 4  # requests at the beginning of a load
OVERHEAD, PER_WORD = 5, 2  # tokens around the words of a prompt, and tokens of a word
_FAULTS = ("", "stream", "cut", "short", "silent", "json")
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "find", "arguments": ""}}


class OpenAIServer:
    """A context manager, whose value is the server. Its app runs in a thread. Each of ``faults`` affects one request:

    a number the answer has that status 'stream' an error event after the first token 'cut' the stream ends after the
    first token 'short' one token less than requested 'silent' no usage 'json' an event that is not valid JSON. Any
    other text is an event of the answer.

    Streams after the warm-up continue when ``open_first`` streams are open.
    """

    def __init__(
        self, *faults: int | str, key: str = "", answer: str = "word ", pause_s: float = 0.0, open_first: int = 0
    ) -> None:
        self.faults, self.key, self.answer, self.pause_s = list(faults), key, answer, pause_s
        self.thoughts, self.arguments = "", ""
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = self.left = 0
        self.url = ""
        self._open_first, self._enough = open_first, asyncio.Event()
        self._loop, self._stop, self._ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        assert self._ready.wait(300)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._completion, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
        ]
        async with served(Starlette(routes=routes)) as self.url:
            self._ready.set()
            await self._stop.wait()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def _completion(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "a wrong key"}}, 401)
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": f"refused with {fault}"}}, fault)
        return StreamingResponse(self._stream(body, fault), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], fault: str) -> AsyncIterator[str]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self._open_first:
            self._enough.set()
        try:
            if len(self.bodies) > WARM_UP:
                await self._enough.wait()
            async for event in self._events(body, fault):
                yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
        except asyncio.CancelledError:
            self.left += 1  # the client went away
            raise
        finally:
            self.open -= 1

    async def _events(self, body: dict[str, Any], fault: str) -> AsyncIterator[dict[str, Any] | str]:
        chat = "messages" in body
        prompt = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        words = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        tokens = int(body.get("max_tokens") or 3) - (fault == "short")
        if self.thoughts:
            yield {"choices": [{"index": 0, "delta": {"reasoning_content": self.thoughts}}]}
        if self.arguments:
            for part in (CALL, {"index": 0, "function": {"arguments": self.arguments}}):
                yield {"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}
        for number in range(tokens):
            yield {"choices": [{"index": 0, "delta": {"content": self.answer}} if chat else {"text": self.answer}]}
            await asyncio.sleep(self.pause_s)
            if number == 0 and fault == "stream":
                yield {"error": {"message": "the engine was lost"}}
            if number == 0 and fault == "json":
                yield "{no json"
            if number == 0 and fault not in _FAULTS:
                yield fault
            if number == 0 and fault == "cut":
                return
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if "max_tokens" in body else "stop"}]}
        if fault != "silent":
            usage = {"prompt_tokens": OVERHEAD + PER_WORD * words, "completion_tokens": tokens}
            yield {"choices": [], "usage": usage}
        yield "[DONE]"

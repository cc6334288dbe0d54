"""A chat request passes through the modules that docs/request_path.md lists, until it reaches an engine."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.messages import EngineCoreRequest
from tests.frontend.played_engine import PlayedEngine
from tests.ingress.harness import client_of

PAGE = Path(__file__).parent.parent / "docs" / "request_path.md"
# Modules that all packages use (data, errors, threads), and modules that a request has passed before its body is read.
FLOOR = {"raylm." + name for name in ("config", "params", "messages", "errors", "metrics", "lazy", "frontend.threads")}
BEFORE = {"raylm.ingress.http." + name for name in ("middleware", "heap", "errors", "exchange", "hosts")}
# Modules of the answer and of accounting, which start before the engine gets the request. They do not read the body.
ANSWER = {
    "raylm.ingress.openai.choices",
    "raylm.ingress.openai.outputs",
    "raylm.frontend.outputs",
    "raylm.frontend.prompt_state",
    "raylm.frontend.text.detokenizer",
    "raylm.frontend.timelines.record",
    "raylm.frontend.timelines.ring",
    "raylm.frontend.engines.routed_engine",
}
STREAM = {"raylm.ingress.http.event_stream", "raylm.ingress.http.sse"}
BODY = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class NotedEngine(PlayedEngine):
    """Records the modules of raylm whose Python functions run, in any thread, until a request is added."""

    def __init__(self) -> None:
        super().__init__("noted", max_model_len=2048, vocab_size=6142)
        self.passed: list[str] = []
        self.arrived = asyncio.Event()

    def listen(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def add(self, request: EngineCoreRequest) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        super().add(request)
        self.arrived.set()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("raylm.") and module not in self.passed:
            self.passed.append(module)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_body_passes_few_modules(stream: bool) -> None:
    llm, engine = AsyncLLM(Config()), NotedEngine()
    llm.add_engine(engine)
    await asyncio.sleep(0)  # the task that reads the engine's stream starts now, because it is not part of the path
    async with client_of(build_asgi_app(llm, Config())) as client:
        await client.get("/health")  # builds the app's middleware
        engine.listen()
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=BODY | {"stream": stream}))
        await engine.arrived.wait()
        engine.say((engine.added[-1].key, 0, [300], "length"))
        assert (await answer).status_code == 200
    await llm.stop()
    page = PAGE.read_text()
    way = [module for module in engine.passed if module not in FLOOR | BEFORE | ANSWER | STREAM]
    listed = re.findall(r"^\d+\. `(raylm\.[a-z_.]+)`: .", page, re.MULTILINE)
    assert {*re.findall(r"^- `(raylm\.[a-z_.]+)`: .", page, re.MULTILINE)} == ANSWER | STREAM
    if stream:  # a stream gets its id first
        assert sorted(way) == sorted(listed)
        assert {*engine.passed} >= STREAM
    else:
        assert way == listed
        assert {*engine.passed} >= ANSWER

"""An engine that plays a model with tools, behind the real ingress. It draws the text of a play (plays.py).

    python -m tests.conformance.scripted_engine COMMAND {url} {url} …

It runs the command with the ingress's address in place of {url}. It fails if a request of the command is refused, or if
a tool of it is left out. ``GET /played`` at that address returns what was played.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextvars import copy_context
from typing import Any
from urllib.parse import parse_qsl

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.config import Config
from raylm.errors import EngineCrashedError, EngineDiedError
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.messages import EngineCoreRequest
from tests.conformance.plays import CUT, WAIT, answer_to, said, turn_of
from tests.frontend.played_engine import PlayedEngine
from tests.ingress.harness import served
from tests.ingress.writing_engine import TOKENIZER

CONTEXT = 131_072  # tokens; the first prompts of agents have up to 31,000 with this tokenizer
_PIECE = 3  # tokens per output
_RECOVERY_S = 300.0


class Play:
    """The answers of all engines, in order. While ``loses`` is set, an engine is lost in the middle of each answer."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.on_lost = on_lost
        self.loses = self.cuts = False
        self.seen: list[str] = []
        self.held = self.aborted = self.lost = 0
        self._requests: set[str] = set()
        self._cut: set[str] = set()

    def note(self, request_id: str, text: str) -> None:
        """Record a conversation from its last ``PLAY`` on, once for each request."""
        if request_id not in self._requests:
            self._requests.add(request_id)
            self.seen.append(text)

    def cut(self, text: str) -> bool:
        """Whether to cut the connection: only the first time that this answer is requested."""
        self.cuts = text not in self._cut
        self._cut.add(text)
        return self.cuts

    def take(self, options: dict[str, str]) -> dict[str, Any]:
        """The record. With ``lose`` (0 or 1), clear it, and stop or start losing engines."""
        found = {"seen": self.seen, "held": self.held, "aborted": self.aborted, "lost": self.lost}
        if (lose := options.get("lose")) is not None:
            self.loses = lose == "1"
            self.seen, self.held, self.aborted, self.lost = [], 0, 0, 0
            self._cut.clear()
        return found


class ScriptedEngine(PlayedEngine):
    """Gives the answer of a play: the calls of the next turn."""

    def __init__(self, play: Play | None = None, name: str = "scripted") -> None:
        super().__init__(name, max_model_len=CONTEXT, vocab_size=TOKENIZER.get_vocab_size())
        self._play = play or Play(lambda: None)

    def abort(self, keys: list[int]) -> None:
        super().abort(keys)
        self._play.aborted += len(keys)

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        play, prompt = self._play, TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        names = [name for name, _ in turn_of(prompt)]
        text = answer_to(prompt)
        play.note(request.request_id, said(prompt) + text)
        if WAIT in names:
            play.held += 1
            return
        cut = CUT in names and play.cut(text)
        ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, request.eos_token_ids[0]]
        drawn = len(request.drawn[0] or ()) if request.drawn else 0
        end = len(ids) // 2 if (play.loses and not drawn) or cut else len(ids)
        for begin in range(drawn, end, _PIECE):
            piece = ids[begin : min(begin + _PIECE, end)]
            self.say((request.key, 0, piece, "stop" if begin + _PIECE >= len(ids) else None))
        if end < len(ids) and not cut:
            play.lost += 1
            self.die(EngineCrashedError("It is gone.") if play.lost % 2 else EngineDiedError("It is gone."))
            play.on_lost()


class _Watch:
    """Wraps an app. Records requests that got an error or lost a tool, and cuts connections."""

    def __init__(self, app: ASGIApp, play: Play) -> None:
        self._app = app
        self._play = play
        self.faults: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/played":
            played = JSONResponse(self._play.take(dict(parse_qsl(scope["query_string"].decode()))))
            await played(scope, receive, send)
            return
        cut = asyncio.Event()

        async def watching(message: Message) -> None:
            if cut.is_set():
                return
            if message["type"] == "http.response.start":
                self._note(scope, message)
            await send(message)
            if self._play.cuts and message.get("body"):
                self._play.cuts = False
                cut.set()

        async def receiving() -> Message:
            """The client's messages. A cut connection is a disconnect, after which uvicorn closes the answer."""
            came, closed = asyncio.ensure_future(receive()), asyncio.ensure_future(cut.wait())
            try:
                await asyncio.wait((came, closed), return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if cut.is_set() else came.result()
            finally:
                came.cancel()
                closed.cancel()

        await self._app(scope, receiving, watching)

    def _note(self, scope: Scope, message: Message) -> None:
        where = f"{scope['method']} {scope['path']}"
        if message["status"] >= 400:
            self.faults.append(f"{where}: {message['status']}")
        ignored = dict(message["headers"]).get(b"x-raylm-ignored-fields", b"").decode()
        if "tool" in ignored:
            self.faults.append(f"{where}: left out {ignored}")


async def _run(command: list[str]) -> int:
    config = Config.model_validate({"model": "embedded", "ingress": {"store": ":memory:"}})
    llm, numbers = AsyncLLM(config, recovery_timeout_s=_RECOVERY_S), iter(range(10**9))

    def add_engine() -> None:
        llm.add_engine(ScriptedEngine(play, f"scripted-{next(numbers)}"))

    play = Play(lambda: loop.call_soon(add_engine, context=around))
    loop, around = asyncio.get_running_loop(), copy_context()
    add_engine()
    app = _Watch(build_asgi_app(llm, config), play)
    try:
        async with served(app) as url:
            process = await asyncio.create_subprocess_exec(*(part.replace("{url}", url) for part in command))
            failed = await process.wait()
    finally:
        await llm.stop()
    for fault in app.faults:
        print(f"FAIL  {fault}")
    return failed or int(bool(app.faults))


if __name__ == "__main__":
    sys.exit(asyncio.run(_run(sys.argv[1:])))

"""An engine that plays a model which uses tools, behind the real ingress: what it says stands in the user's message.

    python -m tests.conformance.scripted_engine COMMAND {url} …

It runs the command, with the ingress's address in place of {url}, and fails if a request of it is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.messages import EngineCoreRequest
from tests.frontend.played_engine import PlayedEngine
from tests.ingress.harness import served
from tests.ingress.writing_engine import TOKENIZER

CONTEXT = 131_072  # tokens; the first prompts of agents have up to 31,000 of this tokenizer
PLAY = "PLAY "
_RESULT = "<tool_response>"  # before each result of a tool, by the chat template
_PIECE = 3  # tokens of one output


class ScriptedEngine(PlayedEngine):
    """Reads the last line ``PLAY [[[name, arguments], ...], ...]`` of a prompt: calls of tools, turn by turn.

    It makes the calls of the next turn, by the number of results after the line, and after the last turn says ``Done.``
    """

    def __init__(self) -> None:
        super().__init__("scripted", max_model_len=CONTEXT, vocab_size=TOKENIZER.get_vocab_size())

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        text = _answer_to(TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False))
        ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, request.eos_token_ids[0]]
        for begin in range(0, len(ids), _PIECE):
            self.say((request.key, 0, ids[begin : begin + _PIECE], "stop" if begin + _PIECE >= len(ids) else None))


def _answer_to(prompt: str) -> str:
    _, found, rest = prompt.rpartition(PLAY)
    if not found:
        return "Done."
    turns, _ = json.JSONDecoder().raw_decode(rest)
    results = rest.count(_RESULT)
    for turn in turns:
        if results <= 0:
            return "\n".join(_call(name, arguments) for name, arguments in turn)
        results -= len(turn)
    return "Done."


def _call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class _Refusals:
    """Wraps an app. Remembers the requests that were answered with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.seen.append(f"{scope['method']} {scope['path']}: {message['status']}")
            await send(message)

        await self._app(scope, receive, noting)


async def _run(command: list[str]) -> int:
    config = Config.model_validate({"model": "embedded", "ingress": {"store": ":memory:"}})
    llm = AsyncLLM(config)
    llm.add_engine(ScriptedEngine())
    app = _Refusals(build_asgi_app(llm, config))
    try:
        async with served(app) as url:
            process = await asyncio.create_subprocess_exec(*(part.replace("{url}", url) for part in command))
            failed = await process.wait()
    finally:
        await llm.stop()
    for refused in app.seen:
        print(f"FAIL  {refused}")
    return failed or int(bool(app.seen))


if __name__ == "__main__":
    sys.exit(asyncio.run(_run(sys.argv[1:])))

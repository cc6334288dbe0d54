"""The serving loads of compare.py: streamed completions from so many clients at once, 128 in / 64 out, over HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.compare.engines import EngineError, ServerEngine
from benchmarks.compare.workloads import PROMPT, SERVED_TOKENS, Figures, Prompts
from benchmarks.http.serving import Client, Load, closed_loop


class WordClient(Client):
    """Sends prompts of an exact number of tokens, as text."""

    def __init__(self, session: aiohttp.ClientSession, engine: ServerEngine, prompts: Prompts) -> None:
        super().__init__(session, engine.url, engine.model, PROMPT, SERVED_TOKENS)
        self._prompts = prompts

    def body(self) -> dict[str, object]:
        """A request no server has seen before."""
        return super().body() | {"prompt": self._prompts.text(self._prompts.one(PROMPT))}


def requests(clients: int, quick: bool) -> int:
    """How many requests so many clients send."""
    least, waves = (4, 2) if quick else (8, 3 if clients <= 8 else 2)
    return max(least, waves * clients)


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each with a request open at all times, until ``total`` are answered."""

    clients: int
    total: int

    def run(self, engine: ServerEngine, prompts: Prompts) -> Figures:
        """Figures of one run against ``engine``.

        Raises:
            EngineError: a request failed, or all together took too long.
        """
        try:
            load = asyncio.run(asyncio.wait_for(self._load(engine, prompts), engine.left_s))
        except TimeoutError as error:
            raise EngineError(f"{engine.name}: {self.total} requests took too long") from error
        errors = [answer.error for answer in load.answers if answer.error]
        if errors:
            raise EngineError(f"{engine.name}: {len(errors)} of {self.total} requests failed: {errors[0]}")
        row = load.row()
        times = {f"{name}_ms": 1e3 * float(row[name]) for name in ("ttft_p50", "itl_p50")}
        return {"out_tok_s": float(row["out_tok_s"]), **times}

    async def _load(self, engine: ServerEngine, prompts: Prompts) -> Load:
        timeout = aiohttp.ClientTimeout(total=engine.left_s)
        # A connection each: llama-server ends the one of a stream, at times after the client has used it again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            client = WordClient(session, engine, prompts)
            started = time.perf_counter()
            answers = await closed_loop(client.ask, self.clients, self.total)
            return Load(f"c={self.clients}", time.perf_counter() - started, answers)

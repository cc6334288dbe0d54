"""The workloads of the comparison: greedy, exact lengths, the same prompts for all engines of one pairing. Offline:

    W1  32 prompts of 128 tokens, all at once, 128 tokens out each: output tokens per second
    W2  one stream, 128 in / 128 out: milliseconds until the first token, and per token after it
    W4  32 requests that share a prefix of 512 tokens (computed by a request before them), 32 own in, 32 out
    W5  one prompt of 2,048 tokens: milliseconds until its first token

``waves`` is the offline rate to compare serving with: as many prompts at once as clients, 128 in / 64 out. Over HTTP,
``ClosedLoop`` sends streamed completions or chats of the same lengths from the given number of clients.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.compare.engines import EngineError, ServerEngine
from benchmarks.http.serving import Client, Load, closed_loop
from raylm.client import Answer, Connection, ask

Prompt = list[int]
Generate = Callable[[list[Prompt], int], float]  # (prompts, tokens of each answer) -> seconds
Figures = dict[str, float]

PROMPT, SERVED_TOKENS = 128, 64
FIRST_TOKENS_RUNS = 3


class Words:
    """Words that are one token each in a checkpoint's vocabulary, so that text and ids are equivalent."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        texts = self.tokenizer.decode_batch([[token_id] for token_id in range(self.tokenizer.get_vocab_size())])
        words = [(token_id, text) for token_id, text in enumerate(texts) if re.fullmatch(r" [a-z]{2,}", text)]
        encoded = self.tokenizer.encode_batch([text for _, text in words], add_special_tokens=False)
        self.ids = [token_id for (token_id, _), found in zip(words, encoded, strict=True) if found.ids == [token_id]]


class Prompts:
    """Random prompts of exact length. The same seed gives the same prompts."""

    def __init__(self, words: Words, seed: str) -> None:
        self._words = words
        self._random = random.Random(seed)

    def one(self, tokens: int) -> Prompt:
        return self._random.choices(self._words.ids, k=tokens)

    def many(self, count: int, tokens: int) -> list[Prompt]:
        return [self.one(tokens) for _ in range(count)]

    def text(self, prompt: Prompt) -> str:
        """The text of ``prompt``."""
        return str(self._words.tokenizer.decode(prompt))


@dataclass(frozen=True)
class Workload:
    """One row of the offline table. ``run`` measures it once."""

    name: str
    run: Callable[[Generate, Prompts], Figures]


def warm_up(generate: Generate, prompts: Prompts) -> None:
    """The warm-up of every engine before measurements."""
    generate(prompts.many(4, PROMPT), 8)
    generate(prompts.many(1, PROMPT), 8)


def batch(generate: Generate, prompts: Prompts) -> Figures:
    """W1."""
    return {"out_tok_s": 32 * 128 / generate(prompts.many(32, PROMPT), 128)}


def stream(generate: Generate, prompts: Prompts) -> Figures:
    """W2. The time of the first token is the median of a few runs, because it is short."""
    first = statistics.median(generate(prompts.many(1, PROMPT), 1) for _ in range(FIRST_TOKENS_RUNS))
    whole = generate(prompts.many(1, PROMPT), 128)
    return {"ttft_ms": 1e3 * first, "ms_per_token": 1e3 * (whole - first) / 127}


def shared_prefix(generate: Generate, prompts: Prompts) -> Figures:
    """W4."""
    prefix = prompts.one(512)
    generate([prefix + prompts.one(32)], 1)
    return {"out_tok_s": 32 * 32 / generate([prefix + prompts.one(32) for _ in range(32)], 32)}


def long_prompt(generate: Generate, prompts: Prompts) -> Figures:
    """W5."""
    return {"ttft_ms": 1e3 * generate(prompts.many(1, 2048), 1)}


def waves(generate: Generate, prompts: Prompts, at_once: int) -> Figures:
    """Output tokens per second of two waves, each of ``at_once`` prompts at the same time."""
    seconds = sum(generate(prompts.many(at_once, PROMPT), SERVED_TOKENS) for _ in range(2))
    return {"out_tok_s": 2 * at_once * SERVED_TOKENS / seconds}


OFFLINE = {
    workload.name: workload
    for workload in (
        Workload("W1", batch),
        Workload("W2", stream),
        Workload("W4", shared_prefix),
        Workload("W5", long_prompt),
    )
}


# ---------------------------------------------------------------- streamed over HTTP


class WordClient(Client):
    """Sends prompts of an exact number of tokens, as text."""

    def __init__(self, connection: Connection, engine: ServerEngine, prompts: Prompts) -> None:
        super().__init__(connection, engine.model, PROMPT, SERVED_TOKENS)
        self._prompts = prompts

    def body(self) -> dict[str, object]:
        return super().body() | {"prompt": self._prompts.text(self._prompts.one(PROMPT))}


class ChatClient(WordClient):
    """Sends the same text as the message of a chat; the model's template adds its own tokens."""

    def body(self) -> dict[str, object]:
        body = super().body()
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        return body

    async def ask(self) -> Answer:
        return await ask(self.connection, "/v1/chat/completions", self.body(), self.max_tokens)


SERVED: dict[str, type[WordClient]] = {"HTTP": WordClient, "chat": ChatClient}


def requests(clients: int, quick: bool) -> int:
    least, waves = (4, 2) if quick else (8, 3 if clients <= 8 else 2)
    return max(least, waves * clients)


@dataclass(frozen=True)
class ClosedLoop:
    """A fixed number of clients, each with one open request at any time, until ``total`` requests are answered."""

    clients: int
    total: int
    kind: type[WordClient] = WordClient

    def run(self, engine: ServerEngine, prompts: Prompts) -> Figures:
        """Measure one run against ``engine``.

        Raises:
            EngineError: A request failed, or the run exceeded its time.
        """
        try:
            load = asyncio.run(self._load(engine, prompts))
        except TimeoutError as error:
            raise EngineError(f"{engine.name}: {self.total} requests took too long") from error
        if load.errors:
            raise EngineError(f"{engine.name}: {len(load.errors)} of {self.total} requests failed: {load.errors[0]}")
        found = load.figures()
        return {"out_tok_s": found["output"], "ttft_p50_ms": found["TTFT p50"], "itl_p50_ms": found["ITL p50"]}

    async def _load(self, engine: ServerEngine, prompts: Prompts) -> Load:
        connection = Connection(engine.url, timeout_s=engine.left_s, keep_alive=False)
        async with asyncio.timeout(engine.left_s), connection:
            client = self.kind(connection, engine, prompts)
            started = time.perf_counter()
            answers = await closed_loop(client.ask, self.clients, self.total)
            return Load(time.perf_counter() - started, answers)

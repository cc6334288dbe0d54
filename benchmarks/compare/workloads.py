"""The offline workloads of compare.py: greedy, exact lengths, the same prompts for whoever runs beside each other.

    W1  32 prompts of 128 tokens, all at once, 128 tokens out each: output tokens per second
    W2  one stream, 128 in / 128 out: milliseconds until the first token, and per token after it
    W4  32 requests that share a prefix of 512 tokens (computed by a request before them), 32 own in, 32 out
    W5  one prompt of 2,048 tokens: milliseconds until its first token

and ``waves``, what serving is compared with: as many prompts at once as clients, 128 in / 64 out.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

Prompt = list[int]
Generate = Callable[[list[Prompt], int], float]  # (prompts, tokens of each answer) -> seconds
Figures = dict[str, float]

PROMPT, SERVED_TOKENS = 128, 64
FIRST_TOKENS_RUNS = 3


class Words:
    """Words of a checkpoint's vocabulary that are one token each, so that text and ids say exactly the same."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        texts = self.tokenizer.decode_batch([[token_id] for token_id in range(self.tokenizer.get_vocab_size())])
        words = [(token_id, text) for token_id, text in enumerate(texts) if re.fullmatch(r" [a-z]{2,}", text)]
        encoded = self.tokenizer.encode_batch([text for _, text in words], add_special_tokens=False)
        self.ids = [token_id for (token_id, _), found in zip(words, encoded, strict=True) if found.ids == [token_id]]


class Prompts:
    """Random prompts of exact length; the same seed gives the same."""

    def __init__(self, words: Words, seed: str) -> None:
        self._words = words
        self._random = random.Random(seed)

    def one(self, tokens: int) -> Prompt:
        """A prompt of so many tokens."""
        return self._random.choices(self._words.ids, k=tokens)

    def many(self, count: int, tokens: int) -> list[Prompt]:
        """So many prompts that share nothing."""
        return [self.one(tokens) for _ in range(count)]

    def text(self, prompt: Prompt) -> str:
        """What a client sends for ``prompt``."""
        return str(self._words.tokenizer.decode(prompt))


@dataclass(frozen=True)
class Workload:
    """One row of the offline table; ``run`` measures it once."""

    name: str
    run: Callable[[Generate, Prompts], Figures]


def warm_up(generate: Generate, prompts: Prompts) -> None:
    """What everybody does once before anything counts."""
    generate(prompts.many(4, PROMPT), 8)
    generate(prompts.many(1, PROMPT), 8)


def batch(generate: Generate, prompts: Prompts) -> Figures:
    """W1."""
    return {"out_tok_s": 32 * 128 / generate(prompts.many(32, PROMPT), 128)}


def stream(generate: Generate, prompts: Prompts) -> Figures:
    """W2; the first token's time is the median of a few runs, as it is short."""
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
    """Output tokens per second when ``at_once`` prompts come together, wave after wave; two waves."""
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

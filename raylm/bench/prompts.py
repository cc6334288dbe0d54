"""What is asked: prompts of common words, drawn at random or as a trace says, of about as many tokens as wanted."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from raylm.config import Frozen
from raylm.simulate import TraceLine, block_number

Range = tuple[int, int]
WORDS = "apple river stone cloud seven green music paper light ocean table horse winter garden silver bridge".split()  # noqa: SIM905
BLOCK = 16  # tokens of a block in recordings
_BLOCK_IN_TRACES = 16


class PromptSettings(Frozen):
    """Ranges are of evenly distributed whole numbers."""

    prompt_tokens: Range = (128, 128)
    """Of what only one request has."""
    output_tokens: Range = (64, 64)
    """Tokens drawn."""
    prefix_tokens: int = Field(0, ge=0, le=1_000_000)
    """What stands before, shared by all requests with the same prefix."""
    prefixes: int = Field(1, ge=1, le=1_000_000)
    """How many different ones there are."""
    tools: int = Field(0, ge=0, le=1000)
    """Functions that the model may call."""
    tool_choice: Literal["auto", "required", "none"] = "auto"
    """Whether it has to."""
    seed: int = 0
    """Of words, lengths and arrivals."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as words or token ids, and the tokens to draw; ``at`` in seconds, ``blocks`` where a trace has them."""

    prompt: tuple[str, ...] | tuple[int, ...]
    output_tokens: int
    at: float = 0.0
    key: str = ""
    blocks: tuple[int, ...] = ()
    block_size: int = BLOCK


@dataclass(frozen=True)
class Scale:
    """How many tokens the server counts for some words: ``per_word`` each, and ``overhead`` around all of them."""

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: float) -> int:
        """How many words make ``tokens`` within a prompt, overhead apart."""
        return max(0, round(tokens / self.per_word))

    def own_words(self, tokens: int, before: int) -> int:
        """How many more words a prompt of ``tokens`` needs behind ``before`` words; one at least."""
        return max(1, self.words(tokens - self.overhead) - before)


def drawn(settings: PromptSettings, scale: Scale, load: int) -> Iterator[Question]:
    """Questions without end; two loads have no words in common that a prefix cache could find."""
    rng = random.Random(f"{settings.seed} {load}")
    while True:
        shared = settings.prefix_tokens and rng.randrange(settings.prefixes)
        prefix = words(f"{settings.seed} {load} prefix {shared}", scale.words(settings.prefix_tokens))
        tokens = settings.prefix_tokens + rng.randint(*settings.prompt_tokens)
        own = scale.own_words(tokens, len(prefix))
        yield Question((*prefix, *rng.choices(WORDS, k=own)), rng.randint(*settings.output_tokens))


def traced(lines: Sequence[TraceLine], scale: Scale, speed: float) -> list[Question]:
    """The requests of a trace, ``speed`` times as fast; equal blocks have equal words."""
    begun = lines[0].arrival
    return [_traced(line, number, scale, (line.arrival - begun) / speed) for number, line in enumerate(lines)]


def _traced(line: TraceLine, number: int, scale: Scale, at: float) -> Question:
    if line.prompt is not None:
        return Question(line.prompt, line.output_tokens, at, line.key)
    assert line.prompt_tokens is not None
    blocks, size = tuple(map(block_number, line.blocks)), line.block_size or _BLOCK_IN_TRACES
    whole = min(len(blocks), line.prompt_tokens // size)  # behind it are blocks of the answer
    shared = [word for block in blocks[:whole] for word in words(f"block {block}", scale.words(size))]
    own = words(f"trace {number}", scale.own_words(line.prompt_tokens, len(shared)))
    return Question((*shared, *own), line.output_tokens, at, line.key, blocks, size)


def words(seed: str, number: int) -> tuple[str, ...]:
    """Always the same for one seed."""
    return tuple(random.Random(seed).choices(WORDS, k=number))


def block_hashes(question: Question, scale: Scale) -> list[str]:
    """Hashes of the prompt's blocks, for a recording: equal where all words up to a block's end are equal."""
    if question.blocks:
        return [f"{block:016x}" for block in question.blocks]
    digest, hashes, done = hashlib.blake2b(digest_size=8), [], 0
    step = max(1, scale.words(BLOCK))
    while done + step <= len(question.prompt):
        digest.update(" ".join(map(str, question.prompt[done : done + step])).encode() + b" ")
        hashes.append(digest.hexdigest())
        done += step
    return hashes


def tools(number: int) -> list[dict[str, Any]]:
    """Definitions of functions, each with a name of its own."""
    return [_tool(f"find_{WORDS[at % len(WORDS)]}_{at}") for at in range(number)]


def _tool(name: str) -> dict[str, Any]:
    place = {"type": "string", "description": "Where to look."}
    most = {"type": "integer", "description": "How many at most."}
    parameters = {"type": "object", "properties": {"place": place, "most": most}, "required": ["place"]}
    described = {"name": name, "description": f"Find what {name} is about, by its place.", "parameters": parameters}
    return {"type": "function", "function": described}

"""Prompts of common words, drawn at random or by a trace, with about the requested number of tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from raylm.config import Frozen
from raylm.simulate import TraceLine, block_number

Range = tuple[int, int]
WORDS = "apple river stone cloud seven green music paper light ocean table horse winter garden silver bridge".split()  # noqa: SIM905
BLOCK = 16  # tokens of a block in recordings
_BLOCK_IN_TRACES = 16


class PromptSettings(Frozen):
    """Parameters of prompts. Ranges are for uniformly distributed integers."""

    prompt_tokens: Range = (128, 128)
    """Tokens that no other request shares."""
    output_tokens: Range = (64, 64)
    """Tokens of the answer."""
    prefix_tokens: int = Field(0, ge=0, le=1_000_000)
    """Tokens of a shared prefix before the prompt."""
    prefixes: int = Field(1, ge=1, le=1_000_000)
    """Number of different prefixes."""
    tools: int = Field(0, ge=0, le=1000)
    """Number of functions that the model may call."""
    tool_choice: Literal["auto", "required", "none"] = "auto"
    """Whether the model must call a function."""
    seed: int = 0
    """For words, lengths and arrivals."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as words or token ids, and the tokens of its answer.

    ``at`` is in seconds, ``blocks`` come from a trace. A question of a session is sent ``think_s`` after the answer to
    the question before it.
    """

    prompt: tuple[str, ...] | tuple[int, ...]
    output_tokens: int
    at: float = 0.0
    key: str = ""
    blocks: tuple[int, ...] = ()
    block_size: int = BLOCK
    session: str = ""
    think_s: float = 0.0


@dataclass(frozen=True)
class Scale:
    """The server's tokens for words: ``per_word`` for each word, and ``overhead`` for the whole prompt."""

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: float) -> int:
        """The number of words for ``tokens`` within a prompt, without overhead."""
        return max(0, round(tokens / self.per_word))

    def own_words(self, tokens: int, before: int) -> int:
        """The number of words to add to ``before`` words for a prompt of ``tokens``, at least one."""
        return max(1, self.words(tokens - self.overhead) - before)


def drawn(settings: PromptSettings, scale: Scale, load: int) -> Iterator[Question]:
    """An endless sequence of questions. Two loads share no prefix that a prefix cache could find."""
    rng = random.Random(f"{settings.seed} {load}")
    while True:
        shared = settings.prefix_tokens and rng.randrange(settings.prefixes)
        prefix = words(f"{settings.seed} {load} prefix {shared}", scale.words(settings.prefix_tokens))
        tokens = settings.prefix_tokens + rng.randint(*settings.prompt_tokens)
        own = scale.own_words(tokens, len(prefix))
        yield Question((*prefix, *rng.choices(WORDS, k=own)), rng.randint(*settings.output_tokens))


def traced(lines: Sequence[TraceLine], scale: Scale, speed: float) -> list[Question]:
    """The requests of a trace, ``speed`` times as fast. Equal blocks have equal words."""
    begun = lines[0].arrival
    return [
        replace(
            _traced(line, number, scale),
            at=(line.arrival - begun) / speed, session=line.session, think_s=line.think_s / speed,
        )
        for number, line in enumerate(lines)
    ]  # fmt: skip


def _traced(line: TraceLine, number: int, scale: Scale) -> Question:
    if line.prompt is not None:
        return Question(line.prompt, line.output_tokens, key=line.key)
    assert line.prompt_tokens is not None
    blocks, size = tuple(map(block_number, line.blocks)), line.block_size or _BLOCK_IN_TRACES
    whole = min(len(blocks), line.prompt_tokens // size)  # the other blocks belong to the answer
    shared = [word for block in blocks[:whole] for word in words(f"block {block}", scale.words(size))]
    own = words(f"trace {number}", scale.own_words(line.prompt_tokens, len(shared)))
    return Question((*shared, *own), line.output_tokens, 0.0, line.key, blocks, size)


def sessions(questions: Sequence[Question]) -> list[list[Question]]:
    """The questions of each session, in order of their first questions. One without a session is alone."""
    found: dict[object, list[Question]] = {}
    for number, question in enumerate(questions):
        found.setdefault(question.session or number, []).append(question)
    return list(found.values())


def words(seed: str, number: int) -> tuple[str, ...]:
    """Random words. Equal seeds give equal words."""
    return tuple(random.Random(seed).choices(WORDS, k=number))


def block_hashes(question: Question, scale: Scale) -> list[str]:
    """Hashes of the prompt's blocks, for a recording. Equal if all words up to the end of the block are equal."""
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
    """Definitions of functions with different names."""
    return [_tool(f"find_{WORDS[at % len(WORDS)]}_{at}") for at in range(number)]


def _tool(name: str) -> dict[str, Any]:
    place = {"type": "string", "description": "Where to look."}
    most = {"type": "integer", "description": "How many at most."}
    parameters = {"type": "object", "properties": {"place": place, "most": most}, "required": ["place"]}
    described = {"name": name, "description": f"Find what {name} is about, by its place.", "parameters": parameters}
    return {"type": "function", "function": described}

"""Traces: requests as JSON lines. A prompt is given by its length, its blocks or its tokens.

A line is an object of
    arrival         seconds since any beginning
    prompt_tokens   number of tokens
    output_tokens   number of tokens of the answer
    blocks          hashes of the first blocks of prompt and answer, numbers or hexadecimal text (optional):
                    equal hashes in equal positions after equal hashes are shared blocks
    block_size      tokens of a block; by default that of the fleet's KV blocks
    prompt          token ids, in place of prompt_tokens and blocks
    key             name of the client's key (optional)
    priority        as in a request (optional)
    sequence, finish, ttft_s, duration_s, cached_tokens   in recordings; ignored here
Lines of a recording whose ``kind`` is not "request" are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from raylm.config import Frozen, faults
from raylm.errors import ConfigError

_TOKEN_BITS = 32
_MOST_TOKENS = 1 << 20
_UNIQUE = 1 << 31  # first token that belongs to only one request


@dataclass(slots=True, eq=False)
class Turn:
    """A later turn of a session, ``after_s`` seconds after the previous answer. ``prompt`` is its new part."""

    after_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request that arrives ``at`` seconds. Its ``answer`` repeats its last token up to ``output_tokens``.

    The ``later`` turns of its session follow.
    """

    at: float
    prompt: list[int]
    answer: list[int]
    output_tokens: int
    key: str = ""
    priority: int = 0
    later: list[Turn] = field(default_factory=list)

    def next_turn(self, now: float) -> SimulatedRequest | None:
        """The next turn: this prompt, its answer and new tokens, after a pause. None after the last turn."""
        if not self.later:
            return None
        turn, *later = self.later
        prompt = self.prompt + self.answer * self.output_tokens + turn.prompt
        return SimulatedRequest(now + turn.after_s, prompt, [prompt[-1]], turn.output_tokens, self.key, later=later)


class TraceLine(Frozen):
    """One validated line."""

    kind: Literal["request"] = "request"
    arrival: float = Field(ge=0, allow_inf_nan=False)
    prompt_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    output_tokens: int = Field(ge=1, le=_MOST_TOKENS)
    blocks: tuple[Annotated[int, Field(ge=0, lt=2**64)] | str, ...] = ()
    block_size: int | None = Field(None, ge=2, le=_MOST_TOKENS)
    prompt: tuple[Annotated[int, Field(ge=0, lt=_UNIQUE)], ...] | None = Field(None, min_length=1)
    key: str = ""
    priority: int = 0
    sequence: str = ""
    finish: str = ""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    cached_tokens: int = 0

    @model_validator(mode="after")
    def _one_prompt(self) -> TraceLine:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("set either prompt_tokens or prompt")
        if self.prompt is not None and self.blocks:
            raise ValueError("blocks: cannot be combined with prompt; use prompt_tokens")
        return self

    def request(self, number: int, begun: float, block_size: int) -> SimulatedRequest:
        """Request number ``number`` of a trace that began at ``begun``."""
        own = _UNIQUE + number % _UNIQUE
        at = self.arrival - begun
        if self.prompt is not None:
            return SimulatedRequest(at, list(self.prompt), [own], self.output_tokens, self.key, self.priority)
        assert self.prompt_tokens is not None
        size = self.block_size or block_size
        tokens = [token for block in self.blocks for token in block_tokens(block_number(block), size)]
        tokens += [own] * max(0, self.prompt_tokens - len(tokens))
        prompt, answer = tokens[: self.prompt_tokens], tokens[self.prompt_tokens :]
        answer = [*answer[: self.output_tokens - 1], own]
        return SimulatedRequest(at, prompt, answer, self.output_tokens, self.key, self.priority)


def read_trace(paths: list[Path], block_size: int) -> list[SimulatedRequest]:
    """All requests of some files in order of arrival, the first at 0. Raises ConfigError as ``read_lines``."""
    lines = read_lines(paths)
    return [line.request(number, lines[0].arrival, block_size) for number, line in enumerate(lines)]


def read_lines(paths: list[Path]) -> list[TraceLine]:
    """All requests of some files, unchanged, in order of arrival.

    Raises:
        ConfigError: names the file, the line and the field.
    """
    lines = [line for path in paths for line in _read(path)]
    if not lines:
        raise ConfigError(f"{', '.join(map(str, paths))}: there is no request.")
    return sorted(lines, key=lambda line: line.arrival)


def _read(path: Path) -> Iterator[TraceLine]:
    try:
        with path.open() as file:
            for number, text in enumerate(file, start=1):
                if text.strip() and (line := _checked(text, f"{path}, line {number}")) is not None:
                    yield line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from None


def _checked(text: str, where: str) -> TraceLine | None:
    try:
        given = json.loads(text)
        if isinstance(given, dict) and given.get("kind", "request") != "request":
            return None
        line = TraceLine.model_validate(given)
        for block in line.blocks:
            block_number(block)
        return line
    except ValidationError as error:
        raise ConfigError(f"{where}: {faults(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def block_number(block: int | str) -> int:
    if isinstance(block, int):
        return block
    try:
        number = int(block, 16)
    except ValueError:
        raise ValueError(f"blocks: {block!r} is not a hexadecimal number") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"blocks: {block!r} has more than 64 bits")
    return number


def block_tokens(block: int, size: int) -> list[int]:
    """The tokens of a block, unique to it. They differ in the last places, where prompts end in a block."""
    return [*[0] * (size - 2), block >> _TOKEN_BITS, block & ((1 << _TOKEN_BITS) - 1)]

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
    session, think_s   a line of a session is sent think_s seconds after the answer to the session's line before it
                    (optional; arrival then only orders the lines, except for the session's first)
    sequence, finish, ttft_s, duration_s, cached_tokens   in recordings; ignored here
Lines of a recording whose ``kind`` is not "request" are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
class SessionTurn:
    """A later turn of a session, ``after_s`` seconds after the previous answer. ``prompt`` is its new part."""

    after_s: float
    prompt: list[int]
    output_tokens: int

    def request(self, before: SimulatedRequest, now: float) -> SimulatedRequest:
        """The request after ``before``: its prompt, its answer and the new tokens."""
        prompt = before.prompt + before.answer * before.output_tokens + self.prompt
        return SimulatedRequest(now + self.after_s, prompt, [prompt[-1]], self.output_tokens, before.key)


@dataclass(slots=True, eq=False)
class TracedTurn:
    """A later line of a session in a trace: line ``number``, for a fleet with blocks of ``block_size`` tokens."""

    line: TraceLine
    number: int
    block_size: int

    def request(self, before: SimulatedRequest, now: float) -> SimulatedRequest:
        """The request after ``before``, whose prompt is the line's alone."""
        return self.line.request(self.number, now + self.line.think_s, self.block_size)


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
    later: list[SessionTurn] | list[TracedTurn] = field(default_factory=list)

    def next_turn(self, now: float) -> SimulatedRequest | None:
        """The next turn, after a pause. None after the last turn."""
        if not self.later:
            return None
        request = self.later[0].request(self, now)
        request.later = self.later[1:]
        return request


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
    session: str = ""
    think_s: float = Field(0.0, ge=0, allow_inf_nan=False)
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
        if self.think_s and not self.session:
            raise ValueError("think_s: needs a session")
        return self

    def request(self, number: int, at: float, block_size: int) -> SimulatedRequest:
        """Request number ``number`` of a trace, which arrives ``at`` seconds."""
        own = _UNIQUE + number % _UNIQUE
        if self.prompt is not None:
            return SimulatedRequest(at, list(self.prompt), [own], self.output_tokens, self.key, self.priority)
        assert self.prompt_tokens is not None
        size = self.block_size or block_size
        begins = size > block_size
        tokens = [token for block in self.blocks for token in block_tokens(block_number(block), size, begins)]
        tokens += [own] * max(0, self.prompt_tokens - len(tokens))
        prompt, answer = tokens[: self.prompt_tokens], tokens[self.prompt_tokens :]
        answer = [*answer[: self.output_tokens - 1], own]
        return SimulatedRequest(at, prompt, answer, self.output_tokens, self.key, self.priority)


class Trace:
    """The requests of a trace in order of arrival, the first at 0. Later turns of a session are with its first.

    Each iteration makes the prompts anew, one at a time, because those of a whole trace may not fit into memory.
    """

    def __init__(self, lines: Sequence[TraceLine], block_size: int) -> None:
        self._lines, self._block_size = lines, block_size

    def __iter__(self) -> Iterator[SimulatedRequest]:
        turns: dict[str, list[TracedTurn]] = {}
        for number, line in enumerate(self._lines):
            if line.session:
                turns.setdefault(line.session, []).append(TracedTurn(line, number, self._block_size))
        begun = self._lines[0].arrival
        for number, line in enumerate(self._lines):
            session = turns.get(line.session, [])
            if not session or session[0].number == number:
                request = line.request(number, line.arrival - begun, self._block_size)
                request.later = session[1:]
                yield request


def read_trace(paths: list[Path], block_size: int) -> Trace:
    """The requests of some files, for a fleet with blocks of ``block_size`` tokens.

    Raises:
        ConfigError: as ``read_lines``.
    """
    return Trace(read_lines(paths), block_size)


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
        with path.open(encoding="utf-8") as file:
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


def block_tokens(block: int, size: int, begins: bool = False) -> list[int]:
    """The tokens of a block, unique to it. They differ in the last places, where prompts end in a block.

    With ``begins`` they also differ in the first places, so that two blocks share no smaller block of a fleet.
    """
    number = [block >> _TOKEN_BITS, block & ((1 << _TOKEN_BITS) - 1)]
    begin = number if begins and size >= 4 else []
    return [*begin, *[0] * (size - 2 - len(begin)), *number]

"""Sessions of coding agents: one JSON file for each session, with hashes of blocks of 64 tokens.

Source: https://github.com/callanjfox/kv-cache-tester, traces. Closed loops: a turn waits for the answer before it, and
then for the think time of the trace. The files do not say when sessions began relative to each other, so their begins
are drawn. The requests of a subagent are turns of its session, because the agent waits for its subagent. Sessions share
no blocks, because hashes are counted anew in each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from raylm.errors import ConfigError
from raylm.simulate.production.selection import Advance, Line, Selection, TraceRecord, checked

_BITS = (1 << 64) - 1


class _AgentRow(TraceRecord):
    type: Literal["n", "s"]
    t: float = Field(ge=0, allow_inf_nan=False)
    """Seconds since the begin of the session, or of the subagent."""
    input_tokens: int = Field(ge=1, alias="in")
    out: int = Field(ge=0)
    hash_ids: list[Annotated[int, Field(ge=0, lt=2**63)]]
    api_time: float = Field(0.0, ge=0, allow_inf_nan=False)
    think_time: float | None = Field(None, ge=0, allow_inf_nan=False)


class _Subagent(TraceRecord):
    type: Literal["subagent"]
    t: float = Field(ge=0, allow_inf_nan=False)
    duration_ms: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Null for a subagent that the agent does not wait for."""
    requests: list[_AgentRow]


class _Session(TraceRecord):
    id: str
    block_size: int = Field(ge=2)
    requests: list[Annotated[_AgentRow | _Subagent, Field(discriminator="type")]]


def agents(paths: list[Path], selection: Selection, advance: Advance, gap_s: float) -> Iterator[Line]:
    """Lines by session, in the order of the files. Sessions begin ``gap_s`` seconds apart on average (Poisson).

    Raises:
        ConfigError: names the file, the line if it is not JSON, and the field.
    """
    rng, begin = selection.rng(), 0.0
    for path in paths:
        kept = rng.random() < selection.share
        session = _read(path)
        advance(path.stat().st_size)
        if kept:
            yield from _lines(session, begin, selection)
            begin += rng.expovariate(1 / gap_s)


def _read(path: Path) -> _Session:
    try:
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return checked(_Session, given, str(path))


def _lines(session: _Session, begin: float, selection: Selection) -> Iterator[Line]:
    base = int.from_bytes(blake2b(session.id.encode(), digest_size=8).digest())
    for at, think_s, one in _turns(session):
        if not selection.fits(one.input_tokens, max(1, one.out)):
            return
        whole = one.hash_ids[: one.input_tokens // session.block_size]
        yield selection.line(
            begin + at, one.input_tokens, max(1, one.out),
            blocks=[(base + block) & _BITS for block in whole], block_size=session.block_size,
            session=session.id, think_s=round(think_s / selection.speed, 6),
        )  # fmt: skip


def _turns(session: _Session) -> Iterator[tuple[float, float, _AgentRow]]:
    """The requests in turn: (seconds since the begin, seconds of thought before it, request)."""
    worked_s, ended = 0.0, 0.0  # by subagents since the last turn, which is a part of the next think time
    latest = 0.0
    for one in session.requests:
        inner = one.requests if isinstance(one, _Subagent) else [one]
        offset, before = (one.t, one.t) if isinstance(one, _Subagent) else (0.0, ended)
        for request in inner:
            at = offset + request.t
            think_s = max(0.0, at - before) if request.think_time is None else request.think_time
            if not isinstance(one, _Subagent):
                think_s = max(0.0, think_s - worked_s)
            before, latest = at + request.api_time, max(latest, at)
            yield latest, think_s, request
        if isinstance(one, _Subagent):
            worked_s += (one.duration_ms or 0.0) / 1000
        else:
            worked_s, ended = 0.0, before

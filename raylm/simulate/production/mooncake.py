"""Mooncake's traces: one JSON object a line, with hashes of blocks of 512 tokens.

Source: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. Open loop: the trace does not name sessions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raylm.errors import ConfigError
from raylm.simulate.production.selection import Advance, Line, Selection, TraceRecord, checked, text_lines

BLOCK = 512


class _MooncakeRow(TraceRecord):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    """In milliseconds."""
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[Annotated[int, Field(ge=0, lt=2**64)]]


def mooncake(paths: list[Path], selection: Selection, advance: Advance) -> Iterator[Line]:
    """Lines in the order of the files.

    Raises:
        ConfigError: names the file, the line and the field.
    """
    rng = selection.rng()
    for where, _, text in text_lines(paths, advance):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        one = checked(_MooncakeRow, given, where)
        if rng.random() < selection.share and selection.fits(one.input_length, one.output_length):
            whole = one.hash_ids[: one.input_length // BLOCK]  # the last id may be of a part of a block
            yield selection.line(
                one.timestamp / 1000, one.input_length, one.output_length, blocks=whole, block_size=BLOCK
            )

"""Azure's LLM traces of 2023: CSV with a time and the lengths of a request. They do not say what prompts share.

Source: https://github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_{code,conv}.csv. Open loop.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pydantic import Field

from raylm.errors import ConfigError
from raylm.simulate.production.selection import Advance, Line, Selection, TraceRecord, checked, text_lines

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class _AzureRow(TraceRecord):
    TIMESTAMP: datetime
    ContextTokens: int = Field(ge=1)
    GeneratedTokens: int = Field(ge=1)


def azure(paths: list[Path], selection: Selection, advance: Advance) -> Iterator[Line]:
    """Lines in the order of the files, from the time of the first request.

    Raises:
        ConfigError: names the file, the line and the column.
    """
    rng, begun = selection.rng(), None
    for where, number, text in text_lines(paths, advance):
        try:
            cells = next(csv.reader([text]))
        except csv.Error as error:
            raise ConfigError(f"{where}: {error}.") from None
        if number == 1:
            if cells != COLUMNS:
                raise ConfigError(f"{where}: must have the columns {', '.join(COLUMNS)}; it has {', '.join(cells)}.")
            continue
        if len(cells) != len(COLUMNS):
            raise ConfigError(f"{where}: must have {len(COLUMNS)} columns; it has {len(cells)}.")
        one = checked(_AzureRow, dict(zip(COLUMNS, cells, strict=True)), where)
        begun = begun or one.TIMESTAMP
        if (begun.tzinfo is None) != (one.TIMESTAMP.tzinfo is None):
            raise ConfigError(f"{where}: TIMESTAMP: {cells[0]} and the first request's must both have a zone, or none.")
        arrival = (one.TIMESTAMP - begun).total_seconds()
        if arrival < 0:
            raise ConfigError(f"{where}: TIMESTAMP: {cells[0]} is before the first request.")
        if rng.random() < selection.share and selection.fits(one.ContextTokens, one.GeneratedTokens):
            yield selection.line(arrival, one.ContextTokens, one.GeneratedTokens)

"""Stage lines: how actors tell the person at the terminal what they have decided, and how the terminal finds it."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["stage", "error"]

_LINE = re.compile(r"\[raylm (stage|error)\] (\S+)\s+(.*)")


def report(kind: Kind, stage: str, text: str) -> None:
    """Write one line to this process's stdout; Ray carries it to the driver, with a prefix of its own."""
    print(f"[raylm {kind}] {stage:8} {' '.join(text.split())}", flush=True)


def parse(line: str) -> tuple[Kind, str, str] | None:
    """(kind, stage, text) of a line that ``report`` wrote, wherever in the line it begins; else None."""
    found = _LINE.search(line)
    return (found[1], found[2], found[3]) if found else None  # type: ignore[return-value]

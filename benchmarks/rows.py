"""Shared code of the benchmarks: options, quantiles, and raw rows of measurements as JSON lines.

A row is {"question", "case", "metric", "value", "unit", "machine", "date", "command"}. A value that was measured
several times has a row for each measurement. ``python -m benchmarks.plot`` draws files of rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Row:
    """One figure: ``metric`` of one ``case`` of a ``question``."""

    question: str
    case: str
    metric: str
    value: float
    unit: str
    machine: str
    date: str
    command: str


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that reports rows. The module's docstring is the help text."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append raw rows to this file")
    return found


class Report:
    """Prints a line for each case immediately, and appends its rows to a file, if any.

    ``units`` maps the metrics to their units, in the order of the columns.
    """

    def __init__(self, question: str, units: Mapping[str, str], out: Path | None) -> None:
        self._question, self._units, self._out = question, units, out
        heads = [f"{metric}, {unit}" if unit else metric for metric, unit in units.items()]
        self._widths = [max(len(head), 9) for head in heads]
        self._line("", heads)

    def add(self, case: str, figures: Mapping[str, float], note: str = "") -> None:
        """Add one case. Missing metrics stay empty."""
        self._line(case, [_number(figures[name]) if name in figures else "" for name in self._units], note)
        if self._out is not None:
            append(self._out, self._question, case, figures, self._units)

    def _line(self, case: str, cells: Sequence[str], note: str = "") -> None:
        shown = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True))
        print(f"{case:44}{shown}  {note}".rstrip(), flush=True)


def append(path: Path, question: str, case: str, figures: Mapping[str, float], units: Mapping[str, str]) -> None:
    """Append the rows of one case to a file.

    Values have six digits. Absolute paths in the command are shortened to their last part.
    """
    words = [f"…/{Path(word).name}" if word.startswith("/") else word for word in sys.argv[1:]]
    command = " ".join(
        word if word.startswith("…/") else shlex.quote(word) for word in ["python", "-m", _module(), *words]
    )
    date = datetime.now(UTC).date().isoformat()
    with path.open("a") as file:
        for metric, value in figures.items():
            row = Row(question, case, metric, float(f"{value:.6g}"), units[metric], machine(), date, command)
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def read(path: Path) -> list[Row]:
    """Read all rows of a file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    return float(np.quantile(values, q))


def machine() -> str:
    """Cores and name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"

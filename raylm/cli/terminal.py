"""Terminal: prints the lines of `raylm serve`, for people or as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from contextlib import suppress

from raylm.stages import Kind, LineFormatter, LogSource, about, parse, parse_json

_PREFIX = re.compile(r"\(([^\s)]+)[^)]*\) (.*)")  # Ray's prefix of an actor's line


class Terminal:
    """Prints lines for people: seconds since the start, the stage, the text.

    A line that cannot be written (full disk, closed pipe) is lost, and serving goes on, as with Python's logging.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # lines of other processes may have any character

    def stage(self, kind: Kind, stage: str, text: str, line: str = "") -> None:
        """Print a stage. ``line`` is the line of the process that reported it; empty if this command reports it."""
        _write(f"{time.monotonic() - self._started:6.1f} s  {stage:8} {text}")

    def output(self, line: str, text: str | None = None) -> None:
        """Print output of a process. ``text`` is the line without Ray's prefix; None for several lines."""
        _write(line if text is None else text)

    def verbose(self, line: str) -> None:
        """Print a line of a process before it is parsed."""
        _write(line)

    def close(self) -> None:
        """Drop lines that still cannot be written. Python would fail on them when it ends."""
        try:
            print(end="", flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class JSONTerminal(Terminal):
    """Prints each line as a JSON object. Lines of RayLM's processes stay unchanged; others get the event ``output``."""

    def __init__(self) -> None:
        super().__init__()
        self._formatter = LineFormatter("json", LogSource("launcher"))

    def stage(self, kind: Kind, stage: str, text: str, line: str = "") -> None:
        self._print(line, text, f"{kind}.{stage}", logging.ERROR if kind == "error" else logging.INFO)

    def verbose(self, line: str) -> None:
        if parse(line) is None:  # other lines are printed as stages
            self.output(line)

    def output(self, line: str, text: str | None = None) -> None:
        for one in filter(str.strip, line.splitlines()):
            prefix = _PREFIX.match(one)
            by, written = prefix.groups() if prefix else ("", one)
            self._print(one, written, "output", logging.INFO, **({"by": by} if by else {}))

    def _print(self, line: str, text: str, event: str, level: int, **values: str) -> None:
        if (fields := parse_json(line)) is not None:
            _write(json.dumps(fields))
            return
        record = logging.LogRecord("raylm", level, "", 0, "%s", (text,), None)
        record.__dict__.update(about(event, **values))
        _write(self._formatter.format(record))


def _write(line: str) -> None:
    with suppress(OSError):
        print(line, flush=True)

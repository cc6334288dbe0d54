"""Terminal: what `raylm serve` prints, for people or as JSON."""

from __future__ import annotations

import json
import logging
import re
import time

from raylm.stages import Kind, LineFormatter, Source, about, parse, parse_json

_PREFIX = re.compile(r"\(([^\s)]+)[^)]*\) (.*)")  # Ray's, before the line of an actor


class Terminal:
    """Lines for people: seconds since the start, the stage, what is told."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def stage(self, kind: Kind, stage: str, text: str, line: str = "") -> None:
        """``line`` is the one in which a process has told it; none where it is of this command."""
        print(f"{time.monotonic() - self._started:6.1f} s  {stage:8} {text}", flush=True)

    def output(self, line: str, text: str | None = None) -> None:
        """What a process has written, ``text`` without Ray's prefix; several lines have no ``text``."""
        print(line if text is None else text, flush=True)

    def verbose(self, line: str) -> None:
        """What a process has written, before it is looked at."""
        print(line, flush=True)


class JSONTerminal(Terminal):
    """Each line is a JSON object: what RayLM's processes write as it is, all else as the event ``output``."""

    def __init__(self) -> None:
        super().__init__()
        self._formatter = LineFormatter("json", Source("launcher"))

    def stage(self, kind: Kind, stage: str, text: str, line: str = "") -> None:
        self._print(line, text, f"{kind}.{stage}", logging.ERROR if kind == "error" else logging.INFO)

    def verbose(self, line: str) -> None:
        if parse(line) is None:  # else it comes as a stage
            self.output(line)

    def output(self, line: str, text: str | None = None) -> None:
        for one in filter(str.strip, line.splitlines()):
            prefix = _PREFIX.match(one)
            by, written = prefix.groups() if prefix else ("", one)
            self._print(one, written, "output", logging.INFO, **({"by": by} if by else {}))

    def _print(self, line: str, text: str, event: str, level: int, **values: str) -> None:
        if (fields := parse_json(line)) is not None:
            print(json.dumps(fields), flush=True)
            return
        record = logging.LogRecord("raylm", level, "", 0, "%s", (text,), None)
        record.__dict__.update(about(event, **values))
        print(self._formatter.format(record), flush=True)

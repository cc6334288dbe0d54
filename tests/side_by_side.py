"""Runs the tests in four processes in parallel: ``python -m tests.side_by_side``.

Tests that start Ray mostly wait, so they have one process. The files of the other tests are distributed over three
processes. The first process prints its progress. The output of the others comes when they have ended. The exit status
is that of the first process that failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "--durations=25", "-m"]
SHARES = 3  # processes for the tests without Ray


def arguments() -> list[list[str]]:
    """The pytest arguments of each process."""
    files = sorted(Path("tests").rglob("test_*.py"))
    shares = [["not ray and not long", *map(str, files[share::SHARES])] for share in range(SHARES)]
    with_ray = [str(file) for file in files if "mark.ray" in file.read_text()]
    return [*shares, ["ray and not long", *with_ray]]


def main() -> int:
    with ExitStack() as stack:
        running, logs = [], []
        for number, found in enumerate(arguments()):
            log = stack.enter_context(tempfile.TemporaryFile("w+")) if number else None
            running.append(subprocess.Popen([*PYTEST, *found], stdout=log, stderr=subprocess.STDOUT))
            stack.callback(running[-1].terminate)
            logs.append(log)
        statuses = []
        for process, log in zip(running, logs, strict=True):
            statuses.append(process.wait())
            if log is not None:
                log.seek(0)
                print(log.read(), flush=True)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the tests that start Ray in one process, beside all others in another: ``python -m tests.halves``.

Tests that start Ray wait for most of their time. Their output comes when both processes have ended. The exit status is
that of the first half that failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest", "--durations=25", "-m"]


def main() -> int:
    with tempfile.TemporaryFile("w+") as log:
        with_ray = subprocess.Popen([*PYTEST, "ray and not long"], stdout=log, stderr=subprocess.STDOUT)
        try:
            without = subprocess.run([*PYTEST, "not ray and not long"], check=False).returncode
            status = with_ray.wait()
        finally:
            with_ray.terminate()
        log.seek(0)
        print(log.read(), flush=True)
    return without or status


if __name__ == "__main__":
    sys.exit(main())

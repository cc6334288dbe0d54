"""The environment of all tests, and of the servers that they start."""

from __future__ import annotations

import os
import shutil
import tempfile

STATE = tempfile.mkdtemp(prefix="raylm-state-")  # where servers of the tests keep responses


# Torch's threads then sleep while they wait, as in RayLM's workers. Threads that spin take the cores from the processes
# of the other tests: 32 answers of transformers took 105 s in place of 9 s. OpenMP reads it when torch is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Ray runs workers at nice 15. They would wait for the processes of the other tests.
os.environ.update({"RAY_worker_niceness": "0"})


def pytest_configure() -> None:
    os.environ["XDG_STATE_HOME"] = STATE


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)

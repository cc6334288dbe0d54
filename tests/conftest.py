"""The environment of all tests, and of the servers that they start."""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# No test may depend on the speed of the machine.
settings.register_profile("raylm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raylm")
STATE = tempfile.mkdtemp(prefix="raylm-state-")  # the servers of the tests store responses here


# With PASSIVE, torch's threads sleep while they wait, as in RayLM's workers. Spinning threads take the cores from the
# processes of other tests: 32 answers of transformers took 105 s instead of 9 s. OpenMP reads the variable when torch
# is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Ray runs workers at nice 15. Then they would wait for the processes of other tests.
os.environ.update({"RAY_worker_niceness": "0"})


def pytest_configure() -> None:
    os.environ["XDG_STATE_HOME"] = STATE


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)

"""Where servers of the tests keep their state."""

from __future__ import annotations

import os
import shutil
import tempfile

STATE = tempfile.mkdtemp(prefix="raylm-state-")  # where servers of the tests keep responses


def pytest_configure() -> None:
    os.environ["XDG_STATE_HOME"] = STATE


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)

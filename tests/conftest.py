"""``@pytest.mark.uses("NAME", …)``: a test of the rest that also needs an extra; skipped where that was taken out."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from tests.extras import has

STATE = tempfile.mkdtemp(prefix="raylm-state-")  # where servers of the tests keep responses


def pytest_configure() -> None:
    os.environ["XDG_STATE_HOME"] = STATE


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an extra that is not there."""
    for item in items:
        for mark in item.iter_markers("uses"):
            for name in mark.args:
                if not has(name):
                    item.add_marker(pytest.mark.skip(reason=f"the extra {name} was taken out"))

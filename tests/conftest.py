"""Where servers of the tests keep their state, and how the tests are shared between processes (pytest-xdist).

A module's tests stay in one process, which makes the module's fixtures once. All tests that start Ray are in one
process, one cluster after the other, and begin first: they wait for most of their time.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

STATE = tempfile.mkdtemp(prefix="raylm-state-")  # where servers of the tests keep responses


def pytest_configure() -> None:
    os.environ["XDG_STATE_HOME"] = STATE


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))

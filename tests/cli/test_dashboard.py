"""Ray's dashboard with `raylm serve`: which Ray it shows, and the message if it cannot start."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from raylm import ray_private
from raylm.cli.main import app
from raylm.stages import parse

pytestmark = pytest.mark.filterwarnings("ignore")  # from pydantic, when Ray Serve is imported


def start_dashboard() -> None:
    from raylm.cli import driver

    driver._start_dashboard()


@pytest.fixture
def other_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process listens at RAY_ADDRESS, as another Ray would."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        yield


@pytest.mark.parametrize("option", ["--dashboard", "--no-dashboard"])
def test_the_dashboard_of_anothers_ray_is_not_ours_to_start(option: str, other_ray: None) -> None:
    done = CliRunner().invoke(app, ["serve", "embedded", option])
    assert done.exit_code == 2
    assert "--dashboard has no effect with RAY_ADDRESS; remove one of them." in done.output


@pytest.fixture
def niceness_values(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The niceness values that were set. A real one could not be undone after a test."""
    asked: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: asked.append(niceness))
    return asked


def test_without_its_packages_there_is_none_and_one_line_says_so(
    niceness_values: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_private, "dashboard_fault", lambda: "No module named 'aiohttp_cors'")
    monkeypatch.setattr(ray_private, "start_dashboard", lambda: pytest.fail("it cannot start"))
    start_dashboard()
    (line,) = capsys.readouterr().out.splitlines()
    said = "no dashboard: No module named 'aiohttp_cors'; pip install 'ray[default]' installs it"
    assert parse(line) == ("stage", "ray", said)
    assert niceness_values == [10]


@pytest.mark.parametrize("is_running", [True, False])
def test_one_that_does_not_start_is_told_unless_everything_ends(
    is_running: bool, niceness_values: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> str:
        raise RuntimeError("first line\nthe port is taken")

    monkeypatch.setattr(ray_private, "dashboard_fault", lambda: None)
    monkeypatch.setattr(ray_private, "start_dashboard", start)
    monkeypatch.setattr("ray.is_initialized", lambda: is_running)
    start_dashboard()
    said = [parse(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [("stage", "ray", "the dashboard did not start: the port is taken")] * is_running


def test_the_packages_of_this_environment_are_there() -> None:
    assert ray_private.dashboard_fault() is None

"""`make software` lists missing programs, installs them if it can, and fails if one is still missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import software

NAMES = ("chromium", "prometheus", "pg_ctlcluster", "redis-server")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(folder: Path, name: str, script: str = "") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_all_is_there(programs: Path) -> None:
    for name in ("google-chrome", "prometheus", "initdb", "redis-server"):
        put(programs, name)
    assert software.main() == 0


@pytest.mark.parametrize("user", [0, 1000])
def test_what_is_missing_and_cannot_be_installed_is_named(
    user: int, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user without root rights may not install, and root may have no apt-get."""
    monkeypatch.setattr("os.geteuid", lambda: user)
    for name in ("chromium", "pg_ctlcluster", "redis-server"):
        put(programs, name)
    if user:
        put(programs, "apt-get", "exit 1")
    assert software.main() == 1
    assert capsys.readouterr().out == "make: the tests need prometheus: sudo apt-get install prometheus\n"


@pytest.mark.parametrize("works", [True, False])
def test_root_installs_it(works: bool, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    log = programs / "log"
    put(programs, "made")
    copy = "; ".join(f"/bin/cp {programs}/made {programs}/{name}" for name in NAMES)
    put(programs, "apt-get", f'echo "$RUNLEVEL $@" >> {log}; {f"[ $2 = update ] || {{ {copy}; }}" if works else ""}')
    assert software.main() == (not works)
    assert log.read_text().splitlines() == [
        "1 --quiet=2 update",
        f"1 --quiet=2 install --yes --no-install-recommends {' '.join(software.PROGRAMS)}",
    ]  # fmt: skip

"""Old session folders: only RayLM's own unused folders are removed."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from raylm.cli.sessions import LONGEST_NAME, PrivateFolder, remove_ended
from raylm.folders import MARKER, mark


def session(folder: Path, name: str, *, ours: bool = True, ray: bool = True) -> Path:
    path = folder / f"raylm-tests-{name}"  # no folder of a real server begins like this
    (path / ("ray" if ray else "haproxy")).mkdir(parents=True)
    if ours:
        mark(path).close()
        number = 1_000_000 + len(list(folder.iterdir()))
        os.utime(path / MARKER, (number, number))
    return path


@contextmanager
def running(*command: str) -> Iterator[None]:
    """Run a command until the block ends. The block begins after its first line of output."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def test_ended_folders_of_ours_are_removed_but_for_the_last_ray(tmp_path: Path) -> None:
    first, second = session(tmp_path, "z"), session(tmp_path, "y")
    others = session(tmp_path, "0", ours=False)
    third, last, haproxys = session(tmp_path, "x"), session(tmp_path, "b"), session(tmp_path, "c", ray=False)
    assert remove_ended([str(tmp_path)]) == ["raylm-tests-z", "raylm-tests-y", "raylm-tests-x", "raylm-tests-c"]
    assert [path.exists() for path in (first, second, third, last, haproxys, others)] == [
        False, False, False, True, False, True,
    ]  # fmt: skip
    assert remove_ended([str(tmp_path)], kept=0) == ["raylm-tests-b"]


def test_nobody_else_can_enter_a_private_folder(tmp_path: Path) -> None:
    first, second = PrivateFolder(str(tmp_path / "new")), PrivateFolder(str(tmp_path / "new"))
    assert first.path != second.path
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert len(f"/{first.path.name}") == len(LONGEST_NAME)
    assert remove_ended([str(tmp_path / "new")], kept=0) == []
    first.close()
    assert remove_ended([str(tmp_path / "new")], kept=0) == [first.path.name]
    second.remove()
    assert not second.path.exists()


def test_a_session_in_use_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    with mark(path):
        assert remove_ended([str(tmp_path)], kept=0) == []
    assert remove_ended([str(tmp_path)], kept=0) == ["raylm-tests-1"]


def test_a_mark_is_held_as_soon_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = session(tmp_path, "1", ours=False), fcntl.flock
    removed: list[str] = []

    def late(file: IO[str], how: int) -> None:
        monkeypatch.undo()
        removed.extend(remove_ended([str(tmp_path)], kept=0))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with mark(path):
        assert removed == remove_ended([str(tmp_path)], kept=0) == []


def test_a_session_of_another_process_stays_until_that_is_killed(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    code = (
        "import pathlib, sys; from raylm.folders import mark; m = mark(pathlib.Path(sys.argv[1])); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with running(sys.executable, "-c", code, f"{tmp_path}/./raylm-tests-1"):
        assert remove_ended([str(tmp_path)], kept=0) == []
        assert path.exists()
    assert remove_ended([str(tmp_path)], kept=0) == ["raylm-tests-1"]


def test_a_session_that_a_raylet_still_uses_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "with_a_raylet_9")
    (path / MARKER).write_text("a line\n")
    with running("tail", "-f", f"{path / MARKER}"):
        assert remove_ended([str(tmp_path)], kept=0) == []
    assert remove_ended([str(tmp_path)], kept=0) == [path.name]


def test_another_users_session_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    if os.getuid() == 0:
        os.chown(path / MARKER, 12345, 12345)
        assert remove_ended([str(tmp_path)], kept=0) == []

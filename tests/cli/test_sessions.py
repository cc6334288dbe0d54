"""Old session folders: only our own go, and only those that nobody uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raylm.cli.sessions import MARKER, mark, remove_ended


def session(folder: Path, name: str, *, ours: bool = True) -> Path:
    path = folder / f"session_of_the_test_{name}"
    (path / "logs").mkdir(parents=True)
    if ours:
        mark(path).close()
    return path


@contextmanager
def running(*command: str) -> Iterator[None]:
    """A process that has written a line, until it is killed."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def test_ended_sessions_of_ours_are_removed_but_for_the_last(tmp_path: Path) -> None:
    first, second = session(tmp_path, "1"), session(tmp_path, "2")
    others = session(tmp_path, "0", ours=False)
    third, last = session(tmp_path, "3"), session(tmp_path, "4")
    (tmp_path / "session_latest").symlink_to(last)
    assert remove_ended(tmp_path) == ["session_of_the_test_1", "session_of_the_test_2", "session_of_the_test_3"]
    assert [path.exists() for path in (first, second, third, last, others)] == [False, False, False, True, True]
    assert remove_ended(tmp_path, kept=0) == ["session_of_the_test_4"]


def test_a_session_in_use_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    with mark(path):
        assert remove_ended(tmp_path, kept=0) == []
    assert remove_ended(tmp_path, kept=0) == ["session_of_the_test_1"]


def test_a_session_of_another_process_stays_until_that_is_killed(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    code = (
        "import pathlib, sys; from raylm.cli.sessions import mark; m = mark(pathlib.Path(sys.argv[1])); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with running(sys.executable, "-c", code, f"{tmp_path}/./session_of_the_test_1"):
        assert remove_ended(tmp_path, kept=0) == []
        assert path.exists()
    assert remove_ended(tmp_path, kept=0) == ["session_of_the_test_1"]


def test_a_session_that_a_raylet_still_uses_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "with_a_raylet_9")
    (path / MARKER).write_text("a line\n")
    with running("tail", "-f", f"{path / MARKER}"):
        assert remove_ended(tmp_path, kept=0) == []
    assert remove_ended(tmp_path, kept=0) == [path.name]


def test_another_users_session_stays(tmp_path: Path) -> None:
    path = session(tmp_path, "1")
    if os.getuid() == 0:
        os.chown(path / MARKER, 12345, 12345)
        assert remove_ended(tmp_path, kept=0) == []

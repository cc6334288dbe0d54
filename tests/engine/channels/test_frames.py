"""PrivateListener: a socket of its own wherever temporary files may be."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import pytest

from raylm.engine.channels import frames
from raylm.engine.channels.frames import PrivateListener


def temporary(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))


def check_works(listener: PrivateListener) -> None:
    directory = Path(listener.path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(listener.path)
    listener.close()
    assert not directory.exists()


def test_a_socket_is_below_the_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        temporary(monkeypatch, Path(place))
        listener = PrivateListener("steps")
        assert Path(place) in Path(listener.path).parents
        check_works(listener)


@pytest.mark.parametrize("there", [True, False], ids=["too long", "missing"])
def test_and_elsewhere_where_it_cannot_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    place = tmp_path / ("long" * 30 if there else "missing")
    if there:
        place.mkdir()
    temporary(monkeypatch, place)
    check_works(PrivateListener("heartbeats"))
    assert not there or not list(place.iterdir()), "a directory is left behind"


def test_where_it_can_be_nowhere_each_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MOST_BYTES", 3)
    with pytest.raises(OSError, match=r"/tmp: the path is longer.*/dev/shm: the path is longer.*TMPDIR"):
        PrivateListener("steps")


def test_a_socket_that_cannot_be_bound_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    temporary(monkeypatch, Path("/tmp"))
    made: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **fields: made.append(make(**fields)) or made[-1])
    with pytest.raises(OSError, match="No such file"):
        PrivateListener("no/such/directory")
    assert made
    assert not Path(made[0]).exists()

"""Private folders of `raylm serve` for the sockets, configuration and logs of its Ray and HAProxy."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from raylm.folders import MARKER, mark

KEPT = 1  # keep the logs of the last Ray, which say why it ended
_PREFIX = "raylm-"
LONGEST_NAME = f"/{_PREFIX}12345678"  # the longest name of a folder, after its parent directory


class PrivateFolder:
    """A folder that only its user can enter (mode 0700), with an unpredictable name.

    Ray's own directories are writable by every user of the machine who can reach them. The folder is in use until it is
    closed or its process ends.
    """

    def __init__(self, parent: str) -> None:
        Path(parent).mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._mark = mark(self.path)

    def close(self) -> None:
        self._mark.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_ended(parents: Iterable[str], kept: int = KEPT) -> list[str]:
    """Remove unused marked folders in ``parents``, except the last ``kept`` that had a Ray. Returns their names.

    A folder is in use while its server holds the mark, or while any process has its path in its command line.
    """
    commands = _commands()
    found = sorted({path for parent in parents for path in Path(parent).glob(f"{_PREFIX}*/{MARKER}")}, key=_made)
    ended = [path.parent for path in found if _has_ended(path, commands)]
    of_ray = [folder for folder in ended if (folder / "ray").is_dir()]
    removed = [folder for folder in ended if folder not in of_ray[len(of_ray) - kept :]]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in removed]


def _made(marker: Path) -> float:
    with suppress(OSError):
        return marker.lstat().st_mtime
    return 0.0


def _has_ended(marker: Path, commands: list[str]) -> bool:
    if marker.parent.is_symlink() or any(marker.parent.name in command for command in commands):
        return False
    try:
        with marker.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_uid == os.getuid()
    except OSError:  # in use, of another user, or removed meanwhile
        return False


def _commands() -> list[str]:
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(entry.read_text(errors="replace"))
    return commands

"""Private folders of `raylm serve`, in which its Ray and HAProxy keep sockets, configuration and logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

MARKER = "raylm_serve.lock"
KEPT = 1  # the logs of the last Ray say why it ended
_PREFIX = "raylm-"
LONGEST_NAME = f"/{_PREFIX}12345678"  # of a folder, behind the directory that it is made in


class PrivateFolder:
    """A folder that its user alone can enter (0700), of a name that nobody could take before.

    Ray's own directories can be written to by every user of the machine who reaches them. It is in use until it is
    closed, or its process ends.
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


def mark(folder: Path) -> IO[str]:
    """Make a folder known as one of `raylm serve`; it is in use until the file is closed."""
    file = (folder / MARKER).open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def remove_ended(parents: Iterable[str], kept: int = KEPT) -> list[str]:
    """Remove the marked folders in ``parents`` that nobody uses, but the last ``kept`` that had a Ray; their names.

    A folder is in use while its server holds the mark, or while a process of any kind names it.
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
    except OSError:  # held, somebody else's, or removed meanwhile
        return False


def _commands() -> list[str]:
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(entry.read_text(errors="replace"))
    return commands

"""The folders in which Rays of `raylm serve` keep sockets and logs: marked while in use, removed when ended."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

MARKER = "raylm_serve.lock"
KEPT = 1  # the last one's logs say why it ended


def mark(session: Path) -> IO[str]:
    """Make a session's folder known as one of `raylm serve`; it is in use until the file is closed."""
    file = (session / MARKER).open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def remove_ended(folder: Path, kept: int = KEPT) -> list[str]:
    """Remove the marked sessions in ``folder`` that nobody uses, but for the last ``kept``; their names.

    A session is in use while its server holds the mark, or while a process of any kind names its folder.
    """
    commands = _commands()
    ended = [path for path in sorted(folder.glob(f"session_*/{MARKER}")) if _has_ended(path, commands)]
    removed = [path.parent for path in ended[: max(0, len(ended) - kept)]]
    for session in removed:
        shutil.rmtree(session, ignore_errors=True)
    return [session.name for session in removed]


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

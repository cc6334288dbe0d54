"""Folders of RayLM: below the user's home directory, and temporary ones with a mark that says whether one is in use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from raylm.errors import ConfigError

MARKER = "raylm_serve.lock"


def in_home(path: str, field: str) -> Path:
    """Replace ``~`` by the home directory.

    Raises:
        ConfigError: the home directory is unknown. The error names ``field``.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{field}: the home directory in {path} is unknown; set HOME, or give an absolute path."
        ) from None


def user_folder(variable: str, default: str) -> Path:
    """RayLM's folder below the directory that a variable of the XDG specification names."""
    return in_home(os.environ.get(variable) or default, variable) / "raylm"


def mark(folder: Path) -> IO[str]:
    """Mark a temporary folder. It is in use until the returned file is closed, at the latest when the process ends.

    `raylm serve` removes marked folders that are not in use.
    """
    file = (folder / f"new-{MARKER}").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(file.name, folder / MARKER)  # so that the mark is never seen without its lock
    return file

"""Rendezvous of an engine's ranks at start. Imports no torch, because that would delay the other ranks."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous as seen by one ``rank``: the ``path`` of a file that all ranks read and write."""

    rank: int = 0
    path: str = ""


def open_rendezvous() -> Rendezvous:
    """Create the rendezvous on rank 0. Ranks may come in any order.

    The file lies in a new directory with mode 0700, so that no other user can join the ranks. The directory is removed
    by ``close_rendezvous``, or when this process exits.
    """
    directory = tempfile.mkdtemp(prefix="raylm-ranks-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Rendezvous(0, os.path.join(directory, "store"))


def close_rendezvous(rendezvous: Rendezvous) -> None:
    """On rank 0, remove the directory once no rank needs it."""
    shutil.rmtree(os.path.dirname(rendezvous.path), ignore_errors=True)

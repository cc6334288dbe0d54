"""Rendezvous of an engine's workers at start. Imports no torch, because that would delay the other workers."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raylm.folders import mark

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous as seen by one ``rank``: the ``path`` of a file that all ranks read and write.

    On several nodes the ``path`` is "host:port", where rank 0 listens; there ``listener`` is its socket. Each rank
    exchanges tensors with the others at ``address``.
    """

    rank: int = 0
    path: str = ""
    address: str = LOOPBACK
    listener: int | None = None

    @property
    def crosses_nodes(self) -> bool:
        return not self.path.startswith("/")


def open_rendezvous(address: str = LOOPBACK) -> Rendezvous:
    """Create the rendezvous on rank 0. Ranks may come in any order.

    The file lies in a new directory with mode 0700, so that no other user can join the ranks. The directory is removed
    by ``close_rendezvous``, or when this process exits. Ranks on several nodes meet at a port of ``address`` instead,
    which must not be loopback.
    """
    if address != LOOPBACK:
        listener = socket.create_server((address, 0), backlog=128)
        port = listener.getsockname()[1]
        return Rendezvous(0, f"{address}:{port}", address, listener.detach())
    directory = tempfile.mkdtemp(prefix="raylm-ranks-")
    atexit.register(_remove, directory, mark(Path(directory)))
    return Rendezvous(0, os.path.join(directory, "store"))


def _remove(directory: str, its_mark: IO[str]) -> None:
    its_mark.close()
    shutil.rmtree(directory, ignore_errors=True)


def close_rendezvous(rendezvous: Rendezvous) -> None:
    """On rank 0, remove the directory once no rank needs it."""
    if rendezvous.crosses_nodes:
        return
    shutil.rmtree(os.path.dirname(rendezvous.path), ignore_errors=True)

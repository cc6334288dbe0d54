"""Rendezvous of an engine's ranks at start. Imports no torch, because that would delay the listening socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous as seen by one ``rank``: the ``port`` on loopback, and on rank 0 the listening socket."""

    rank: int = 0
    port: int = 0
    listener: socket.socket | None = None


def open_rendezvous() -> Rendezvous:
    """Create the rendezvous on rank 0. The socket listens at once, so that ranks may connect in any order."""
    listener = socket.create_server((LOOPBACK, 0))
    return Rendezvous(0, listener.getsockname()[1], listener)

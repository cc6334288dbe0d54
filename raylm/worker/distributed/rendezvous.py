"""Where the ranks of one engine meet when they start; no torch, whose import would delay the socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What one ``rank`` knows of it: the ``port`` on the loopback, and on rank 0 the socket that listens there."""

    rank: int = 0
    port: int = 0
    listener: socket.socket | None = None


def open_rendezvous() -> Rendezvous:
    """Rank 0's; the socket listens from now on, so that ranks may come in any order."""
    listener = socket.create_server((LOOPBACK, 0))
    return Rendezvous(0, listener.getsockname()[1], listener)

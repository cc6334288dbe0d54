"""The fork server: a single-threaded process that forks a child for each connection. A child may crash.

A server loads the data that its children need, and then calls ``serve``. Both sides of a connection use the same
frames. If the other side closes the connection while a child works, the kernel ends the child.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 1 << 30
"""Address space that a child may allocate in addition to the server's."""
_PIECE = 2**16


def take_signals() -> None:
    """Reset signal handlers to defaults, because the parent process may have blocked or ignored signals."""
    # the server ends with its parent, which may still need it after an interrupt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the children
    for deadly in (signal.SIGALRM, signal.SIGPROF, signal.SIGIO):
        signal.signal(deadly, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def serve(descriptor: int, live: Callable[[socket.socket], None]) -> None:
    """Call ``live`` in a child for each connection received over the Unix socket ``descriptor``, until it is closed.

    The caller must have one thread and must not have imported torch or ray, so that it may fork.
    """
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), sys.stderr.fileno())  # hides messages of crashing children
    set_limits()
    with socket.socket(fileno=descriptor) as control:
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            with socket.socket(fileno=descriptors[0]) as connection:
                if _fork() == 0:
                    try:
                        control.close()
                        live(connection)
                    finally:
                        os._exit(0)


def set_limits() -> None:
    """Set the limits of children. The server itself needs no more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _fork() -> int:
    """Fork. Returns 0 in the child, and -1 if it fails, which closes the connection."""
    try:
        return os.fork()
    except OSError:
        return -1


def die_with(connection: socket.socket) -> None:
    """Let the kernel end this process when the other side closes the connection or writes to it."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    closed, _, _ = select.select([connection], [], [], 0)
    if closed:  # it was closed before the kernel was asked
        os._exit(1)


def outlive(connection: socket.socket) -> None:
    """Undo ``die_with``."""
    fcntl.fcntl(connection, fcntl.F_SETFL, 0)


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def frame_end(received: bytes | bytearray) -> int | None:
    """The end of a frame that begins with ``received``; None if its length is not known yet."""
    return LENGTH.size + LENGTH.unpack_from(received)[0] if len(received) >= LENGTH.size else None


def read_frame(connection: socket.socket) -> bytes | None:
    """The body of the next frame; None if the other side closes the connection before its end."""
    received = bytearray()
    while (end := frame_end(received)) is None or len(received) < end:
        piece = connection.recv(_PIECE)
        if not piece:
            return None
        received += piece
    return bytes(memoryview(received)[LENGTH.size :])

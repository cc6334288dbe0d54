"""The fork server: a process of one thread that forks a child for each connection, and that may lose the child.

A server reads what its children need, and then calls ``serve``. Both sides of a connection use one form of frames.
While a child works, the kernel ends it when the other side closes the connection, whatever the child does.
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
"""Address space that a child may take beyond what the server holds."""
_PIECE = 2**16


def take_signals() -> None:
    """Give a server the default signals, whatever the process that started it had blocked or ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent, which may want to finish something
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for deadly in (signal.SIGALRM, signal.SIGPROF, signal.SIGIO):
        signal.signal(deadly, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def serve(descriptor: int, live: Callable[[socket.socket], None]) -> None:
    """Call ``live`` in a child for each connection that comes over the Unix socket ``descriptor``, until it is closed.

    The caller imports neither torch nor ray and has one thread, so that it may fork.
    """
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), sys.stderr.fileno())  # what a dying child says
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
    """For the children; the server itself is done with what takes memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _fork() -> int:
    """0 in the child; -1 if there is none, which closes the connection without a word."""
    try:
        return os.fork()
    except OSError:
        return -1


def die_with(connection: socket.socket) -> None:
    """Let the kernel end this process, whatever it does, when the other side closes the connection or writes to it."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    closed, _, _ = select.select([connection], [], [], 0)
    if closed:  # before the kernel was asked
        os._exit(1)


def outlive(connection: socket.socket) -> None:
    """Take ``die_with`` back."""
    fcntl.fcntl(connection, fcntl.F_SETFL, 0)


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def frame_end(received: bytes | bytearray) -> int | None:
    """Where a frame ends that begins with what was ``received``; None if its length is not known yet."""
    return LENGTH.size + LENGTH.unpack_from(received)[0] if len(received) >= LENGTH.size else None


def read_frame(connection: socket.socket) -> bytes | None:
    """The body of the next frame; None if the other side closes the connection before the frame is whole."""
    received = bytearray()
    while (end := frame_end(received)) is None or len(received) < end:
        piece = connection.recv(_PIECE)
        if not piece:
            return None
        received += piece
    return bytes(memoryview(received)[LENGTH.size :])

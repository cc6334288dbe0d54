"""Frames: values between two processes of one node, pickled, each behind its length, on a Unix socket."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 107  # of a Unix socket's path on Linux, without the zero at its end


class PrivateListener:
    """A Unix socket at ``path`` that listens, in a directory of its own.

    That has mode 0700: what comes here is unpickled, and believed, as no other user can have sent it. It is below
    TMPDIR, or below /tmp or /dev/shm where the path is too long for a socket or no directory can be made.

    Raises:
        OSError: no directory can be made in any of these places.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._directory = _directory(len(name))
        self.path = os.path.join(self._directory, name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(self.path)
            self.socket.listen(most)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Expect nobody any more; connections that were accepted stay."""
        self.socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _directory(name_bytes: int) -> str:
    """A new private directory in which a socket may have a name of so many bytes."""
    failed = []
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        try:
            directory = tempfile.mkdtemp(prefix="raylm-", dir=place)
        except OSError as error:
            failed.append(f"{place}: {error.strerror}")
            continue
        if len(os.fsencode(directory)) + 1 + name_bytes <= _MOST_BYTES:
            return directory
        os.rmdir(directory)
        failed.append(f"{place}: the path is longer than the {_MOST_BYTES} bytes of a socket's")
    raise OSError(f"A Unix socket has no place ({'; '.join(failed)}); TMPDIR must be a short path with room.")


def frame(value: Any) -> bytes:
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """The next value; waits for it, and is None where the other end has gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(head)[0])
    return pickle.loads(body) if body else None


class Frames:
    """The values in what a socket gives piece by piece; ``rest`` are the bytes that make no whole one yet."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The values that are whole with ``data``; all of them must be taken before the next call."""
        rest = self.rest
        rest += data
        while len(rest) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
            if len(rest) < end:
                return
            value = pickle.loads(rest[_LENGTH.size : end])
            del rest[:end]
            yield value

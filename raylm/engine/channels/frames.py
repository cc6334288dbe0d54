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


class PrivateListener:
    """A Unix socket at ``path`` that listens, in a directory of its own.

    That has mode 0700: what comes here is unpickled, and believed, as no other user can have sent it.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._directory = tempfile.mkdtemp(prefix="raylm-")
        self.path = os.path.join(self._directory, name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.path)
        self.socket.listen(most)

    def close(self) -> None:
        """Expect nobody any more; connections that were accepted stay."""
        self.socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


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

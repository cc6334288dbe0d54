"""Link: values between two processes of one node over a Unix socket, and the signs of life of both.

A frame is 4 bytes of length and a pickle. A frame of length 0 is a sign of life, which each end sends every BEAT_S.
The end of the socket, or SILENCE_S without a byte, is the death of the other process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, cast

from raylm.folders import mark

BEAT_S = 0.25
SILENCE_S = 3.0
START_SILENCE_S = 60.0  # while a process starts: importing a library may hold Python's lock for long
LOST = "was lost"

_LENGTH = struct.Struct("<I")
_BEAT = _LENGTH.pack(0)
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end: pid, uid, gid
_FATAL = b"Fatal Python error"  # faulthandler's first words
_MOST_BYTES = 107  # of a Unix socket's path on Linux, without the zero at its end

logger = logging.getLogger("raylm.engine")


class Silence:
    """Calls ``on_silent`` once when nothing was ``heard`` for ``limit_s``; ``on_turn`` is called every BEAT_S.

    Silence is counted in turns of this event loop. So a process that was stopped itself reports nobody as lost.
    """

    def __init__(
        self, on_silent: Callable[[], None], limit_s: float, on_turn: Callable[[], None] | None = None
    ) -> None:
        self.limit_s = limit_s
        self._on_silent, self._on_turn = on_silent, on_turn
        self.silent_s = 0.0
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._turn)

    def heard(self) -> None:
        self.silent_s = 0.0

    def stop(self) -> None:
        self._timer.cancel()

    @property
    def is_long(self) -> bool:
        """Whether nothing was heard for longer than a living process is silent by chance."""
        return self.silent_s > 2 * BEAT_S

    def _turn(self) -> None:
        self.silent_s += BEAT_S
        if self.silent_s > self.limit_s:
            self._on_silent()
            return
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._turn)
        if self._on_turn is not None:
            self._on_turn()


class Link(asyncio.Protocol):
    """One end of a link, on an event loop.

    ``on_value`` gets each value in order. ``on_end`` is called once with the reason when the other end is lost, and not
    after ``close``; it may still ``send``. With ``kills`` a silent process is killed first, as it may only be stopped
    and continue later. ``room_bytes`` bounds what the socket holds of values that the other end has not read: beyond
    that ``has_room`` is clear.
    """

    _transport: asyncio.Transport
    _silence: Silence

    def __init__(
        self,
        on_value: Callable[[Any], None],
        on_end: Callable[[str], None],
        *,
        limit_s: float = SILENCE_S,
        kills: bool = False,
        room_bytes: int | None = None,
    ) -> None:
        self.pid = 0  # of the other process; 0 where it is in a container of its own
        self.last_words = ""  # what faulthandler wrote as a fatal signal ended the other process
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._on_value, self._on_end = on_value, on_end
        self._limit_s, self._kills, self._room_bytes = limit_s, kills, room_bytes
        self._rest = bytearray()
        self._is_paused = False
        self.is_closed = False

    @classmethod
    async def connect(
        cls, path: str, on_value: Callable[[Any], None], on_end: Callable[[str], None], **options: Any
    ) -> Link:
        """Connect to the Listener at ``path``; ``options`` are those of Link.

        Raises:
            OSError: nobody listens there.
        """
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_value, on_end, **options), path)
        return link

    def send(self, value: Any) -> None:
        """Send a value; nothing once the link has ended."""
        if not self._transport.is_closing():
            self._transport.write(frame(value))

    def set_limit(self, limit_s: float) -> None:
        """How long the other end may be silent from now on."""
        self._silence.limit_s = limit_s

    def pause(self) -> None:
        """Receive no values until ``resume``. The silence of the other end does not count meanwhile."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()

    def send_last_words(self) -> None:
        """From now on a fatal signal writes its traceback to the other end."""
        faulthandler.enable(self._transport.get_extra_info("socket").fileno(), all_threads=False)

    @property
    def is_silent(self) -> bool:
        """Whether the other process may be stopped."""
        return not self.is_closed and self._silence.is_long

    def kill(self) -> None:
        """SIGKILL the other process, which also ends a stopped one; while the link is open no other has its pid."""
        if self.pid and not self._transport.is_closing():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the link when all is sent."""
        self.is_closed = True
        self._silence.stop()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no class of asyncio's
        connection = transport.get_extra_info("socket")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid = _CREDENTIALS.unpack(peer)[0]
        if self._room_bytes is not None:
            self._transport.set_write_buffer_limits(0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._room_bytes)
        self._silence = Silence(self._on_silent, self._limit_s, self._beat)

    def data_received(self, data: bytes) -> None:
        self._silence.silent_s = 0.0  # as ``heard``, without a call for each message
        rest = self._rest
        rest += data
        at = 0
        try:
            while len(rest) - at >= 4 and not self.is_closed:
                end = at + 4 + _LENGTH.unpack_from(rest, at)[0]
                if len(rest) < end:
                    break
                if end > at + 4:
                    self._on_value(pickle.loads(rest[at + 4 : end]))
                at = end
        except Exception:
            logger.exception("a value from process %d cannot be read", self.pid)
            self._end("sent a value that cannot be read")
        del rest[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        why = LOST
        if (at := self._rest.find(_FATAL)) >= 0:
            text = self._rest[at:].replace(_BEAT, b"").decode(errors="replace")
            self.last_words = text.strip()
            why = f"crashed: {self.last_words.splitlines()[0]}"
        self.has_room.set()
        self._end(why)

    def pause_writing(self) -> None:
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.has_room.set()

    def _beat(self) -> None:
        if self._is_paused:
            self._silence.heard()
        self._transport.write(_BEAT)

    def _on_silent(self) -> None:
        if self._kills:
            self.kill()
        self._end(f"has given no sign of life for {self._silence.limit_s:g} s")

    def _end(self, why: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._silence.stop()
            self._on_end(why)
            self._transport.close()


class ThreadLink:
    """One end of a link in a process whose threads compute: reads block, and a thread of its own beats.

    That thread needs Python's lock for a moment only. So its signs of life say that the process lives, and nothing
    about the step that it computes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, Lock()
        self._stream = connection.makefile("rb")
        self._has_last_words = False
        Thread(target=self._beat, name="raylm-beats", daemon=True).start()

    def send(self, value: Any) -> None:
        """Send a value; OSError if the other end is gone."""
        self._send(frame(value))

    def read(self) -> Any:
        """Wait for the next value; None when the other end is gone."""
        with suppress(ConnectionError):
            while len(head := self._stream.read(4)) == 4:
                if size := _LENGTH.unpack(head)[0]:
                    body = self._stream.read(size)
                    return pickle.loads(body) if len(body) == size else None
        return None

    def send_last_words(self) -> None:
        """From now on a fatal signal writes its traceback to the other end."""
        faulthandler.enable(self._socket.fileno(), all_threads=False)
        self._has_last_words = True

    def close(self) -> None:
        """Close the connection, which also ends the signs of life."""
        if self._has_last_words:  # the number of the closed socket may become that of another file
            faulthandler.disable()
        self._stream.close()  # the socket stays open as long as its stream
        with self._lock:
            self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                self._send(_BEAT)
                time.sleep(BEAT_S)


class Listener:
    """A Unix socket at ``path`` that listens, in a directory of its own.

    The directory has mode 0700. So what comes here was sent by the same user, and may be unpickled. It is below
    TMPDIR, or below /tmp or /dev/shm where the path is too long for a socket or no directory can be made. With
    ``beside``, the path of another Listener, it is in the directory of that one, whose ``close`` removes both. If this
    process is killed, the next `raylm serve` removes the directory.

    Raises:
        OSError: no directory can be made in any of these places.
    """

    def __init__(self, name: str = "link", beside: str | None = None) -> None:
        self._directory = _directory(len(name)) if beside is None else None
        self.path = os.path.join(self._directory or os.path.dirname(beside or ""), name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server: asyncio.Server | None = None
        self._mark: IO[str] | None = None
        try:
            if self._directory is not None:
                self._mark = mark(Path(self._directory))
            self.socket.bind(self.path)
            self.socket.listen()
        except OSError:
            self.close()
            raise

    async def serve(self, accept: Callable[[], Link]) -> None:
        """Accept connections. ``accept`` makes the Link of each process. Processes that already wait come first."""
        self._server = await asyncio.get_running_loop().create_unix_server(accept, sock=self.socket)

    def close(self) -> None:
        """Accept no more connections; accepted ones stay."""
        if self._server is not None:
            self._server.close()
        self.socket.close()
        if self._mark is not None:
            self._mark.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def frame(value: Any) -> bytes:
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


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
    advice = "Set TMPDIR to a short path on a disk with free space."
    raise OSError(f"No directory can hold a Unix socket ({'; '.join(failed)}). {advice}")

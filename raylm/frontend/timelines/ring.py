"""Timelines: owns the records of one AsyncLLM: those of requests in flight, and a bounded number of ended ones."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import orjson

from raylm.errors import RayLMError
from raylm.frontend.timelines.describe import Raw, summary
from raylm.frontend.timelines.record import Clock, Part, Record

_COMPRESSED_FROM = 2**14  # bytes; the JSON of a request of thousands of prompts is compressed to an eighth
_HEAD = struct.Struct("<d?5I")  # of an ended request: its time, whether it is compressed, where its fields end
_OBJECT_BYTES = 64  # of a bytes object and its place, without its data


class RequestObserver(Protocol):
    """Called with each request when it has ended. Must not raise or block the event loop."""

    def __call__(self, raw: Raw, record: Record) -> None: ...

    def close(self, timeout_s: float) -> None:
        """Finish work that has begun. Called on any thread."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects requests. ``owner`` is the name of the asking key, None to see the requests of all keys.

    ``text`` is searched in the id, the path, the model and the key's name. Requests that ended before ``since`` are
    omitted.
    """

    owner: str | None
    state: str = "all"  # or in_flight, recent
    text: str = ""
    key: str | None = None
    model: str | None = None
    since: float = 0.0
    limit: int = 100


class _Ended:
    """An ended request: its search fields, its entry in a list, and its raw record, both as JSON.

    Reads them from one bytes object, which ``pack`` makes. An object of more than 512 bytes lies in the C heap, which
    can be trimmed. Small objects that are kept for thousands of requests would each keep a pool of Python's allocator
    (16 KiB), and with it the memory of large requests that have ended.
    """

    __slots__ = ("_data", "_ends", "_is_compressed", "ended")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.ended: float
        self.ended, self._is_compressed, *self._ends = _HEAD.unpack_from(data)

    @staticmethod
    def pack(record: Record, raw: Raw, ended: float) -> bytes:
        """The bytes of a request that has ended at ``ended``. A long record is compressed by zlib."""
        stored = orjson.dumps(raw)
        if is_compressed := len(stored) >= _COMPRESSED_FROM:
            stored = zlib.compress(stored, level=1)
        texts = (text.encode() for text in (record.id, record.key, record.model, record.path))
        fields = [*texts, orjson.dumps(summary(raw))]
        ends = accumulate(map(len, fields), initial=_HEAD.size)
        next(ends)
        return b"".join([_HEAD.pack(ended, is_compressed, *ends), *fields, stored])

    @property
    def id(self) -> str:
        return self._field(0).decode()

    @property
    def key(self) -> str:
        return self._field(1).decode()

    @property
    def model(self) -> str:
        return self._field(2).decode()

    @property
    def path(self) -> str:
        return self._field(3).decode()

    @property
    def summary(self) -> bytes:
        return self._field(4)

    @property
    def raw(self) -> bytes:
        stored = self._data[self._ends[-1] :]
        return zlib.decompress(stored) if self._is_compressed else stored

    def _field(self, place: int) -> bytes:
        return self._data[self._ends[place - 1] if place else _HEAD.size : self._ends[place]]


class Timelines:
    """Stores records. Belongs to one event loop, so it has no locks. ``ingress`` is this process's name in records.

    The last ``max_requests`` ended requests are kept, in at most ``max_bytes``, without text of prompts or answers.
    ``on_end`` is called with each record that ends.
    """

    def __init__(
        self,
        max_requests: int = 10_000,
        max_bytes: int = 16 * 2**20,
        clock: Clock = time.time,
        on_end: Callable[[Record], object] = id,
    ) -> None:
        self.ingress = "ingress"
        self.clock = clock
        self.observers: tuple[RequestObserver, ...] = ()
        self._max_requests, self._max_bytes, self._on_end = max_requests, max_bytes, on_end
        self._in_flight: dict[Record, None] = {}
        self._ended: deque[bytes] = deque()  # as _Ended.pack makes them
        self._size = 0

    def begin(self, record: Record) -> None:
        """Begin the timeline of a request, which ``end_record`` ends."""
        self._in_flight[record] = None

    def end_record(self, record: Record, error: BaseException | None = None) -> None:
        """End the timeline of a request, which ``error`` has ended if there is one."""
        if error is not None:
            self._fail(record, error)
        record.ended = self.clock()
        self._close(record)

    @contextmanager
    def part(self, current: Record | None, request_id: str, model: str) -> Iterator[Part]:
        """Add a part for a prompt to the ``current`` record. Without a record, as in offline use, open one."""
        record = current or Record(request_id, "", "offline", self.clock)
        if current is None:
            self.begin(record)
        record.model = record.model or model
        part = Part(request_id, self.clock)
        record.parts.append(part)
        try:
            yield part
        except BaseException as error:
            part.error = _name(error)
            if current is None:
                self._fail(record, error)
            raise
        finally:
            part.ended = self.clock()
            if current is None:
                record.ended = part.ended
            self._close(record)

    def _fail(self, record: Record, error: BaseException) -> None:
        record.error = _name(error)
        if record.status is None and isinstance(error, Exception):
            record.status = error.status if isinstance(error, RayLMError) else None

    def _close(self, record: Record) -> None:
        """Move a record to the ended ones, when its answer is written and all its parts have ended."""
        if record.ended is None or any(part.ended is None for part in record.parts) or record not in self._in_flight:
            return
        record.ended = max([record.ended, *(part.ended or 0.0 for part in record.parts)])
        del self._in_flight[record]
        record.cancel = None  # holds the request, which holds the record: only the garbage collector would free them
        self._on_end(record)
        raw = record.raw(self.ingress)
        self._ended.append(_Ended.pack(record, raw, record.ended))
        self._size += len(self._ended[-1]) + _OBJECT_BYTES
        while len(self._ended) > self._max_requests or self._size > self._max_bytes:
            self._size -= len(self._ended.popleft()) + _OBJECT_BYTES
        for observe in self.observers:
            observe(raw, record)

    def close(self, timeout_s: float) -> None:
        """Close the observers, each within ``timeout_s``, on any thread. Later calls do nothing."""
        observers, self.observers = self.observers, ()
        for observer in observers:
            observer.close(timeout_s)

    # ---------------------------------------------------------------- queries

    def listed(self, wanted: Filter) -> list[tuple[float, bytes]]:
        """(time, entry as JSON) of the newest requests that match, requests in flight first."""
        found: list[tuple[float, bytes]] = []
        if wanted.state != "recent":
            open_ones = (one for one in reversed(self._in_flight) if _matches(one, wanted))
            shown = islice(open_ones, wanted.limit)  # an entry takes about 25 us, and thousands may be in flight
            found += [(one.received, orjson.dumps(summary(one.raw(self.ingress)))) for one in shown]
        if wanted.state != "in_flight":
            for ended in map(_Ended, reversed(self._ended)):
                if len(found) >= wanted.limit or ended.ended < wanted.since:
                    break
                if _matches(ended, wanted):
                    found.append((ended.ended, ended.summary))
        return found

    def part_ids(self, wanted: Filter) -> list[str]:
        """The engines' ids of requests in flight that match."""
        return [part.request_id for record in self._in_flight if _matches(record, wanted) for part in record.parts]

    def find(self, request_id: str, owner: str | None) -> bytes | None:
        """The raw record, as JSON, of the newest request with that id; None if ``owner`` has none."""
        for record in reversed(self._in_flight):
            if record.id == request_id and owner in (None, record.key):
                return orjson.dumps(record.raw(self.ingress))
        start = request_id.encode()
        named = (_Ended(data) for data in reversed(self._ended) if data.startswith(start, _HEAD.size))
        for ended in named:
            if ended.id == request_id and owner in (None, ended.key):
                return ended.raw
        return None

    def end(self, request_id: str, owner: str | None, error: Callable[[], RayLMError]) -> bool:
        """End the requests of that id with an error. Returns whether there was one in flight."""
        found = [one for one in self._in_flight if one.id == request_id and owner in (None, one.key) and one.cancel]
        for record in found:
            assert record.cancel is not None
            record.cancel(error())
        return bool(found)


def _matches(entry: Record | _Ended, wanted: Filter) -> bool:
    if wanted.owner is not None and entry.key != wanted.owner:
        return False
    if (wanted.key is not None and entry.key != wanted.key) or (
        wanted.model is not None and entry.model != wanted.model
    ):
        return False
    text = wanted.text.lower()
    return not text or any(text in value.lower() for value in (entry.id, entry.path, entry.model, entry.key))


def _name(error: BaseException) -> str:
    """The kind of an error. Its message is omitted, because it may contain part of a prompt."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "client_left"
    if isinstance(error, RayLMError):
        return error.code or error.type
    return "client_left" if type(error).__name__ == "ClientDisconnectedError" else type(error).__name__

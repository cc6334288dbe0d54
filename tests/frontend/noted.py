"""A request's timeline as a context manager, for tests of stored timelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raylm.frontend.timelines.record import Record
from raylm.frontend.timelines.ring import Timelines


@contextmanager
def noted(timelines: Timelines, request_id: str, key: str, path: str) -> Iterator[Record]:
    """The timeline of a request. It ends with the block."""
    record = Record(request_id, key, path, timelines.clock)
    timelines.begin(record)
    try:
        yield record
    except BaseException as error:
        timelines.end_record(record, error)
        raise
    timelines.end_record(record)

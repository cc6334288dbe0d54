"""Stored timelines are bounded in number and bytes, and a request ends with the last of its prompts."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count

import orjson
import pytest

from raylm.errors import OverloadedError
from raylm.frontend.timelines.describe import timeline
from raylm.frontend.timelines.record import MAX_EVENTS, Part, Record
from raylm.frontend.timelines.ring import Filter, Timelines
from tests.frontend.noted import noted

ALL = Filter(owner=None, limit=100_000)


def ticking() -> Callable[[], float]:
    """A clock that advances by one at each read."""
    return map(float, count()).__next__


def ids(timelines: Timelines, wanted: Filter = ALL) -> list[str]:
    return [orjson.loads(line)["id"] for _, line in timelines.listed(wanted)]


def test_the_newest_are_kept() -> None:
    timelines = Timelines(max_requests=3)
    for number in range(5):
        with noted(timelines, str(number), "", "/v1/completions"):
            assert ids(timelines)[0] == str(number)
    assert ids(timelines) == ["4", "3", "2"]
    assert timelines.find("1", None) is None


def test_the_bytes_are_bounded() -> None:
    timelines = Timelines(max_bytes=100_000)
    for number in range(1000):
        with noted(timelines, str(number), "", "/") as record, timelines.part(record, "p", "m") as part:
            for _ in range(10):
                part.note((1, 0, "preempted", 1.0, 1, 1, "x" * 100))
    kept = [timelines.find(name, None) for name in ids(timelines)]
    assert 10 < len(kept) < 1000
    assert sum(len(raw) for raw in kept if raw) < 100_000


def test_the_record_of_a_request_with_thousands_of_prompts_is_found_whole_and_kept_small() -> None:
    timelines = Timelines(clock=ticking())
    with noted(timelines, "many", "", "/v1/embeddings") as record:
        for number in range(2048):
            with timelines.part(record, f"embd-{number}", "m") as part:
                part.note((1, 0, "ended", 1.0, 1, 1, ""))
    expected = orjson.dumps(record.raw("ingress"))
    assert timelines.find("many", None) == expected
    assert timelines._size < len(expected) / 4


def test_events_of_a_part_are_bounded() -> None:
    part = Part()
    for _ in range(MAX_EVENTS + 5):
        part.note((1, 0, "scheduled", 1.0, 1, 1, ""))
    assert (len(part.events), part.dropped_events) == (MAX_EVENTS, 5)


def test_a_request_lasts_as_long_as_its_prompts() -> None:
    timelines = Timelines(clock=ticking())
    with noted(timelines, "a", "", "/") as record:
        running = timelines.part(record, "p", "m")
        running.__enter__()
    assert ids(timelines, Filter(owner=None, state="in_flight")) == ["a"]
    running.__exit__(None, None, None)
    assert ids(timelines, Filter(owner=None, state="in_flight")) == []
    assert ids(timelines, Filter(owner=None, state="recent")) == ["a"]


def test_without_a_request_a_prompt_is_one() -> None:
    timelines = Timelines()

    def refused() -> None:
        with timelines.part(None, "p", "m"):
            assert ids(timelines) == ["p"]
            raise OverloadedError("full")

    with pytest.raises(OverloadedError):
        refused()
    (line,) = [orjson.loads(line) for _, line in timelines.listed(ALL)]
    assert (line["path"], line["model"], line["outcome"], line["status"]) == ("offline", "m", "overloaded", 429)


async def test_prompts_belong_to_their_request() -> None:
    timelines = Timelines()

    async def work(record: Record, name: str) -> None:
        with timelines.part(record, name, "m"):
            await asyncio.sleep(0)

    with noted(timelines, "a", "", "/") as first, noted(timelines, "b", "", "/") as second:
        await asyncio.gather(work(first, "one"), work(second, "three"), work(first, "two"))
    found = [orjson.loads(timelines.find(name, None) or b"{}") for name in "ab"]
    assert [[part["request_id"] for part in one["parts"]] for one in found] == [["one", "two"], ["three"]]


def test_an_owner_sees_its_own() -> None:
    timelines = Timelines()
    for key in ("alice", "bob"):
        with noted(timelines, f"of-{key}", key, "/"):
            pass
    assert ids(timelines, Filter(owner="alice")) == ["of-alice"]
    assert timelines.find("of-bob", "alice") is None
    assert timelines.find("of-bob", None) is not None


def test_no_more_is_told_of_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines, told, raw = Timelines(clock=ticking()), [], Record.raw
    monkeypatch.setattr(Record, "raw", lambda one, ingress: told.append(one.id) or raw(one, ingress))
    with ExitStack() as open_ones:
        for number in range(50):
            open_ones.enter_context(noted(timelines, f"r{number}", "", "/a"))
        assert ids(timelines, Filter(None, limit=3)) == told == ["r49", "r48", "r47"]


def test_phases_add_up_by_a_clock_that_ticks() -> None:
    """Each read of the clock takes one second, so the sum is exact."""
    clock = ticking()
    timelines = Timelines(clock=clock)
    with noted(timelines, "a", "", "/") as record:
        for phase in ("body", "parse", "template"):
            record.mark(phase)
        with timelines.part(record, "p", "m") as part:
            for phase in ("tokenize", "route", "send"):
                part.mark(phase)
            # The engine's clock is far ahead. Its events still count as between sending and the first token.
            part.events = [(0, "taken_in", 1e9, 1, 0, ""), (0, "scheduled", 1e9, 1, 0, "")]
            part.first_token, part.last_token = clock(), clock()
    raw = orjson.loads(timelines.find("a", None) or b"")
    found = timeline(raw, 0.0)
    assert found["wall_s"] == sum(phase["seconds"] for phase in found["phases"])
    names = [phase["phase"] for phase in found["phases"]]
    assert names == ["admission", "body", "parse", "template", "tokenize", "route", "send", "decode", "write"]


def test_a_request_is_told_once_and_whole_as_it_ends() -> None:
    told: list[Record] = []
    timelines = Timelines(on_end=told.append)
    with noted(timelines, "a", "alice", "/") as record:
        running = timelines.part(record, "p", "m")
        running.__enter__().prompt_tokens = 3
        with timelines.part(record, "q", "m"):
            pass
    assert told == []
    running.__exit__(None, None, None)
    with timelines.part(None, "offline", "m"):
        pass
    assert [(record.id, record.key, len(record.parts)) for record in told] == [("a", "alice", 2), ("offline", "", 1)]


def test_an_ended_request_takes_no_more_memory_than_is_counted() -> None:
    """A result of orjson may keep ten times its size in memory."""
    timelines = Timelines()

    def end(number: int) -> None:
        with noted(timelines, f"request-{number}", "alice", "/v1/chat/completions") as record:
            record.mark("body")
            with timelines.part(record, f"chatcmpl-{number}", "m") as part:
                part.note((1, 0, "ended", 1.0, 1, 1, ""))

    end(0)
    tracemalloc.start()
    try:
        counted, before = timelines._size, tracemalloc.get_traced_memory()[0]
        for number in range(1, 501):
            end(number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= timelines._size - counted

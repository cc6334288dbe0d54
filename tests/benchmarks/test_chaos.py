"""benchmarks/chaos.py compares what answers say, not how they came."""

from __future__ import annotations

from typing import Any

from benchmarks.chaos import joined, stable


def event(text: str, index: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"id": text, "choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}


def test_a_stream_says_the_same_however_it_is_cut() -> None:
    whole = joined([event("abc"), event("x", 1), event("d", 0, "stop")])
    assert joined([event("x", 1), event("a"), event("bcd", 0, "stop")]) == whole
    assert joined([event("x", 1), event("a"), event("bcd", 0, "length")]) != whole
    assert joined([event("x"), event("a", 1), event("bcd", 1, "stop")]) != whole
    said = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": part}} for part in "ab"]
    assert joined(said) == {"texts": {"0 text": "ab"}, "ends": {}}


def test_ids_and_times_are_left_out_wherever_they_stand() -> None:
    assert stable({"id": 1, "a": [{"created": 2, "b": 3}]}) == {"a": [{"b": 3}]}

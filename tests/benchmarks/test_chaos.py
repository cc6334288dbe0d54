"""benchmarks/chaos.py compares the content of answers, not their chunks, and assigns silences to faults."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.asking import joined, stable
from benchmarks.chaos import _roles
from benchmarks.silences import Fault, silences, undisturbed


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


def fault(at: float, victim: str, *others: str) -> Fault:
    return Fault(at, "death", "SIGKILL Worker", victim, frozenset(others))


def test_a_silence_is_of_the_fault_before_it() -> None:
    faults = [fault(10, "a", "b"), fault(19, "b", "a")]
    found = [*silences(faults, [[5, 9.5, 12, 13, 18, 25, 26], [30, 40]])]
    assert [(one.fault.at, one.begin, one.seconds) for one in found] == [(10, 18, 7), (19, 18, 7)]
    assert [one.covered for one in found] == [False, True], "the other engine had a fault before its end"
    (alone,) = silences([fault(10, "a")], [[9, 11]])
    assert not alone.covered, "there was no other engine"
    (late,) = silences([fault(10, "a", "b")], [[9, 11, 19, 19.5, 40]])
    assert late.seconds == 20.5, "it began within ten seconds of the fault"
    (spared,) = silences([fault(10, "a", "b", "c"), fault(11, "b", "c")][:2], [[9, 10.5, 11]])
    assert spared.covered


def test_a_stream_is_undisturbed_if_no_fault_was_near() -> None:
    (found,) = undisturbed([fault(10, "a")], [[21, 22, 25], [19, 22, 25], [9, 11]])
    assert (found.stream, found.begin, found.seconds) == (0, 22, 3)


@pytest.mark.parametrize(
    "name",
    ["SERVE_REPLICA::default#Engine#ab1", "EngineCore:default:0f:ab1.3", "Worker 0 of EngineCore:default:0f:ab1.3"],
)
def test_a_process_of_an_engine_is_known_by_its_name(name: str) -> None:
    cluster = {
        "ingresses": [{"pid": 1, "state": "ready", "engines": 2}, {"pid": 2, "state": "starting", "engines": 0}],
        "engines": [{"id": "ab1.3"}, {"id": "cd2.0"}],
        "actors": [{"pid": 7, "name": name}],
    }
    assert _roles(7, cluster) == ("ab1", frozenset({"cd2"}))
    assert _roles(2, cluster) == ("2", frozenset({"1"}))

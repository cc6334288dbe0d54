"""The Scheduler's events of its sequences: each once, in order, and none for single tokens."""

from __future__ import annotations

from itertools import count
from typing import Any

from raylm.engine.scheduler import Scheduler
from raylm.engine.timelines.observer import EventRecorder
from raylm.messages import EngineCoreOutputs, SequenceEvent
from tests.engine.build import CLIENT, EOS, Engine, crowd, request
from tests.engine.test_outbox import Outbox, news


class Watched(Engine):
    """An Engine that keeps its events. The clock advances by one with each event."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.events: list[SequenceEvent] = []
        recorder = EventRecorder(self._note, clock=map(float, count()).__next__)
        self.scheduler._observer = recorder

    def _note(self, client_id: str, event: SequenceEvent) -> None:
        assert client_id == CLIENT
        self.events.append(event)

    def of(self, key: int) -> list[tuple[str, int, int]]:
        """(kind, step, tokens) of each event of a request."""
        return [(event[2], event[4], event[5]) for event in self.events if event[0] == key]


def test_a_life_is_four_events_however_many_tokens() -> None:
    engine = Watched(num_blocks=32)
    engine.add([1] * 10, max_tokens=20)
    for _ in range(20):
        engine.step()
    assert engine.of(0) == [("scheduled", 1, 0), ("token", 1, 11), ("ended", 20, 30)]


def test_a_long_prompt_and_a_cached_one_say_where_they_begin() -> None:
    engine = Watched(num_blocks=32, max_num_batched_tokens=8)
    engine.add([1] * 18, key=1, max_tokens=1)
    for _ in range(3):
        engine.step()
    engine.add([1] * 18, key=2, max_tokens=1)
    engine.step()
    assert engine.of(1) == [("scheduled", 1, 0), ("token", 3, 19), ("ended", 3, 19)]
    assert engine.of(2) == [("scheduled", 4, 16), ("token", 4, 19), ("ended", 4, 19)]


def test_a_preemption_says_for_whom_and_what_is_lost() -> None:
    engine = Watched(num_blocks=4, steps_in_flight=1)
    crowd(engine, 7, 8)
    for _ in range(2):
        engine.step()
    (preempted,) = [event for event in engine.events if event[2] == "preempted"]
    assert (preempted[0], preempted[6]) == (1, "0")
    assert preempted[5] > 0
    engine.scheduler.abort(CLIENT, 0)
    engine.step()
    assert [kind for kind, *_ in engine.of(1)] == ["scheduled", "token", "preempted", "scheduled", "token"]
    engine.step(EOS)
    assert engine.of(1)[-1][0] == "ended"


def test_sequences_of_one_request_are_told_apart() -> None:
    engine = Watched(num_blocks=32)
    engine.add([1] * 5, n=2, max_tokens=2)
    for _ in range(3):
        engine.step()
    assert {(event[1], event[2]) for event in engine.events} == {
        (index, kind) for index in (0, 1) for kind in ("scheduled", "token", "ended")
    }


def test_an_abort_is_an_end_too() -> None:
    engine = Watched(num_blocks=32)
    engine.scheduler.add(CLIENT, request([1] * 5, key=3))
    engine.scheduler.abort(CLIENT, 3)
    assert engine.of(3) == [("ended", 0, 5)]


def test_without_an_observer_nothing_is_kept() -> None:
    engine = Engine()
    assert isinstance(engine.scheduler, Scheduler)
    engine.add([1] * 5, max_tokens=1)
    assert isinstance(engine.step(), EngineCoreOutputs)


async def test_events_travel_with_the_next_message_and_once() -> None:
    outbox = Outbox()
    event: SequenceEvent = (1, 0, "scheduled", 1.0, 1, 0, "")
    outbox.note_event(event)
    outbox.put(news(5))
    assert (await outbox.get()).events == [event]
    outbox.put(news(6))
    assert (await outbox.get()).events == []

"""Ends of sequences in the Scheduler: by a token, by length, aborted, stopped, failed, or before they begin."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.errors import ContextLengthError, InvalidRequestError, RayLMError
from tests.engine.build import CLIENT, EOS, Engine, crowd


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [4, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 3}, [4, EOS, 4], "length", None),
        ({"stop_token_ids": (3,)}, [4, 3], "stop", 3),
        ({"stop_token_ids": (EOS,)}, [EOS], "stop", None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [4, EOS], "stop", EOS),
        ({"min_tokens": 2}, [EOS, 4, EOS], "stop", None),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS], "length", None),
        ({"max_tokens": 1}, [EOS], "stop", None),
        ({"max_tokens": 1}, [4], "length", None),
    ],
)
def test_finish(params: dict[str, Any], tokens: list[int], reason: str, stop_reason: int | None) -> None:
    engine = Engine()
    engine.add([1] * 5, **params)
    for token in tokens[:-1]:
        out = engine.step(token)
        assert out is not None
        assert out.finish_reasons == [None]
    out = engine.step(tokens[-1])
    assert out is not None
    assert (out.finish_reasons, out.stop_reasons) == ([reason], [stop_reason])
    assert not engine.scheduler.has_work
    engine.kv.check_idle()


def test_the_context_ends() -> None:
    engine = Engine(max_model_len=7)
    engine.add([1] * 5, max_tokens=100)
    engine.step()
    out = engine.step()
    assert out is not None
    assert out.finish_reasons == ["length"]


def test_requests_that_cannot_be_served() -> None:
    engine = Engine(max_model_len=7)
    with pytest.raises(ContextLengthError, match=r"7 tokens.*at most 7"):
        engine.add([1] * 7)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        engine.add([])
    engine.add([1])
    with pytest.raises(RayLMError, match="key 0"):
        engine.add([1])


@pytest.mark.parametrize("state", ["waiting", "in flight", "running", "preempted"])
def test_abort(state: str) -> None:
    engine = Engine(num_blocks=6)
    plan = None
    if state == "preempted":
        crowd(engine, 4, 6, 9)
        plan = engine.schedule()
        assert next(engine.scheduler.waiting.candidates()).key == 1
    else:
        engine.add([1] * 5, key=1, n=2)
        if state == "in flight":
            plan = engine.schedule()
        elif state == "running":
            engine.step()
            engine.step()
    engine.scheduler.abort(CLIENT, 1)
    engine.scheduler.abort(CLIENT, 1)
    engine.scheduler.abort(CLIENT, 77)
    engine.scheduler.abort("another client", 0)
    assert (CLIENT, 1) not in engine.scheduler.open_requests()
    out = engine.update(plan) if plan else None
    assert out is None or 1 not in out.keys
    for key in (0, 2):
        engine.scheduler.abort(CLIENT, key)
    engine.kv.check_idle()
    assert not engine.scheduler.has_work
    assert engine.scheduler.schedule() is None


@pytest.mark.parametrize("in_flight", [False, True])
def test_one_of_several_sequences_can_be_stopped(in_flight: bool) -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 5, n=3)
    engine.step()
    engine.step()
    plan = engine.schedule() if in_flight else None
    for name in ((0, 1), (0, 1), (0, 7), (9, 0)):
        engine.scheduler.stop(CLIENT, *name)
    assert len(engine.scheduler.running) == 2
    out = engine.update(plan or engine.schedule())
    assert out is not None
    assert sorted(out.indexes) == [0, 2]
    engine.scheduler.stop(CLIENT, 0, 0)
    assert engine.scheduler.has_work
    engine.scheduler.stop(CLIENT, 0, 2)
    assert not engine.scheduler.has_work
    engine.kv.check_idle()


def test_what_a_request_forbids_itself_is_its_clients_fault_and_its_prompt_is_still_shared() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 9, key=0)
    engine.step()
    engine.add([1] * 9, key=1, bad_words=("a",), min_tokens=1)
    out = engine.update(engine.schedule(), 5, undrawable=[(1, "nothing is left")])
    assert out is not None
    ((key, error),) = out.errors
    assert (key, type(error), error.message) == (1, InvalidRequestError, "No token can be drawn: nothing is left.")
    assert error.param == "bad_words"
    engine.add([1] * 9, key=2)
    again = engine.schedule()
    assert again.num_computed[again.seq_ids.index(again.new[0].seq_id)] == 8


def test_a_failed_sequence_ends_its_request_and_its_content_is_not_reused() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 9, key=0, n=2)
    engine.add([2] * 9, key=1)
    engine.step()
    plan = engine.schedule()
    out = engine.update(plan, 5, 5, failed=[(0, "logits are not finite")])
    assert out is not None
    assert [(key, error.message) for key, error in out.errors] == [(0, "logits are not finite")]
    assert set(out.keys) == {1}
    engine.add([1] * 9, key=2)
    engine.add([2] * 9, key=3)
    again = engine.schedule()
    computed = dict(zip(again.seq_ids, again.num_computed, strict=True))
    assert [computed[new.seq_id] for new in again.new] == [0, 8]

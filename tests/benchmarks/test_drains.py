"""benchmarks/drains.py counts every process that ended or began, except those of one engine."""

from __future__ import annotations

from benchmarks.drains import others

STAY = {1: "ServeReplica:default:Ingress", 2: "ServeController", 3: "haproxy"}
FIRST = {10: "ServeReplica:default:Engine", 11: "EngineCoreActor", 12: "WorkerActor"}
SECOND = {20: "ServeReplica:default:Engine", 21: "EngineCoreActor", 22: "WorkerActor"}


def test_one_engine_may_go_or_come() -> None:
    assert others(STAY | FIRST | SECOND, STAY | FIRST) == []
    assert others(STAY | FIRST, STAY | FIRST | SECOND) == []


def test_whatever_else_ends_or_begins_is_named() -> None:
    restarted = FIRST | {13: "WorkerActor"}
    del restarted[12]
    assert others(STAY | FIRST | SECOND, STAY | restarted) == ["WorkerActor", "WorkerActor"]
    assert others(STAY | FIRST | SECOND, STAY | FIRST | {4: "haproxy"}) == ["haproxy"]
    assert sorted(others(STAY | FIRST, FIRST | SECOND)) == sorted(STAY.values())

"""The waiting queues: order, removal, and return of sequences."""

from __future__ import annotations

import pytest

from raylm.engine.queues import WaitingQueue
from raylm.engine.sequence import Sequence
from tests.engine.build import Engine, sequence


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while queue:
        seq = next(queue.candidates())
        queue.start(seq, 0)
        order.append(seq.id)
    return order


def create(policy: str) -> WaitingQueue:
    return Engine(policy=policy).scheduler.waiting


def filled(policy: str, priorities: list[int]) -> tuple[WaitingQueue, list[Sequence]]:
    queue = create(policy)
    sequences = [sequence([1], seq_id=place, arrival=place, priority=value) for place, value in enumerate(priorities)]
    for seq in sequences:
        queue.push(seq)
    return queue, sequences


@pytest.mark.parametrize(
    ("policy", "order"), [("fair", [0, 1, 2, 3]), ("fcfs", [0, 1, 2, 3]), ("priority", [1, 3, 0, 2])]
)
def test_order(policy: str, order: list[int]) -> None:
    queue, _ = filled(policy, [5, -1, 5, 0])
    assert drain(queue) == order


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_who_was_preempted_comes_before_who_arrived_later(policy: str) -> None:
    queue, sequences = filled(policy, [0, 0, 0])
    queue.remove(sequences[1])
    queue.remove(sequences[0])
    queue.push(sequences[1])
    queue.push(sequences[0])
    assert drain(queue) == [0, 1, 2]


def test_removal_from_anywhere() -> None:
    queue, sequences = filled("fair", [0] * 500)
    for seq in sequences[:200] + sequences[300:]:
        queue.remove(seq)
    assert len(queue) == 100
    assert drain(queue) == list(range(200, 300))


def test_siblings_stand_beside_the_sequence_they_belong_to() -> None:
    queue = create("fcfs")
    for seq_id, (arrival, index) in enumerate([(1, 0), (0, 1), (0, 2)]):
        queue.push(sequence([1], seq_id=seq_id, arrival=arrival, index=index))
    assert drain(queue) == [1, 2, 0]

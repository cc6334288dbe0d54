"""Faults in the engine core's handling of drafts and deferred draws. The random runs must detect each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raylm.engine.kv_cache_manager import Lookahead
from raylm.engine.scheduler import Scheduler
from raylm.engine.sequence import Sequence, Status
from tests.engine.planting import Patch, Plant, caught, faults_of, wrap


def accepted_drafts_are_not_counted(patch: Patch) -> None:
    patch.setattr(Sequence, "accept_drafts", lambda self, extra: None)


def a_rejected_draft_counts_as_computed(patch: Patch) -> None:
    wrap(patch, Sequence, "accept_drafts", lambda original, self, extra: original(self, extra + (extra > 0)))


def blocks_are_reserved_for_one_token_a_step(patch: Patch) -> None:
    patch.setattr(Lookahead, "_longest", lambda self, seq: seq.num_tokens)


def blocks_are_reserved_for_one_step_in_flight(patch: Patch) -> None:
    def longest(original: Any, self: Lookahead, seq: Sequence) -> int:
        return min(original(self, seq), len(seq.token_ids) + 1 + self._drafts)

    wrap(patch, Lookahead, "_longest", longest)


def drafts_preempt_others(patch: Patch) -> None:
    def tokens_to_reserve(self: Lookahead, seq: Sequence, num_running: int) -> int:
        return min(self._kv.capacity(seq) + 1 + self._drafts, seq.limit + 1)

    patch.setattr(Lookahead, "tokens_to_reserve", tokens_to_reserve)


def tokens_behind_an_end_are_delivered(patch: Patch) -> None:
    def remove(original: Any, self: Scheduler, seq: Sequence) -> None:
        original(self, seq)
        self._sequences[seq.id] = seq

    wrap(patch, Scheduler, "_remove", remove)


def the_worker_is_not_told_the_limit(patch: Patch) -> None:
    wrap(patch, Sequence, "as_new", lambda original, self, block_ids: replace(original(self, block_ids), limit=10**6))


def a_deferred_draw_is_counted(patch: Patch) -> None:
    patch.setattr(Sequence, "defer", lambda self: None)


def a_preempted_sequence_is_not_deferred(patch: Patch) -> None:
    wrap(patch, Sequence, "defer", lambda original, self: original(self) if self.status is Status.RUNNING else None)


@pytest.mark.parametrize("plant", faults_of(__name__), ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant: Plant, monkeypatch: Patch) -> None:
    assert caught(plant, monkeypatch)

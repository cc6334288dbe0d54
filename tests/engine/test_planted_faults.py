"""Faults in the engine core. The random runs must detect each of them, otherwise they prove nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from raylm.engine import kv_cache_manager, queues, sequence
from raylm.engine.block_pool import BlockPool
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.outbox import ClientOutputs
from raylm.engine.scheduler import Scheduler
from raylm.engine.sequence import Sequence, Status
from raylm.engine.step_plan import StepPlan
from raylm.messages import SchedulerOutput
from tests.engine.planting import LIVES, Patch, Plant, caught, faults_of, lives, wrap

# -------------------------------------------------------------------- blocks


def a_partial_block_is_published(patch: Patch) -> None:
    def extend(original: Any, self: Any, hashes: list[bytes], root: bytes, tokens: list[int], num_blocks: int) -> None:
        size = self._block_size
        hashes += [root + bytes(tokens[: (block + 1) * size]) for block in range(len(hashes), num_blocks)]

    def publish(original: Any, self: Any, seq: Sequence, num_computed: int) -> None:
        original(self, seq, num_computed + self.block_size - 1)

    wrap(patch, kv_cache_manager.ChainedHasher, "extend", extend)
    wrap(patch, KVCacheManager, "publish", publish)


def a_block_is_published_before_it_is_computed(patch: Patch) -> None:
    def publish(original: Any, self: Any, seq: Sequence, num_computed: int) -> None:
        original(self, seq, len(seq.token_ids))

    wrap(patch, KVCacheManager, "publish", publish)


def unknown_tokens_are_published(patch: Patch) -> None:
    def publish(original: Any, self: Any, seq: Sequence, num_computed: int) -> None:
        known = seq.token_ids
        seq.token_ids = known[:]
        seq.token_ids.extend([1] * max(0, num_computed - len(known)))
        original(self, seq, num_computed)
        seq.token_ids = known

    wrap(patch, KVCacheManager, "publish", publish)


def the_salt_is_left_out(patch: Patch) -> None:
    patch.setattr(kv_cache_manager.ChainedHasher, "root", lambda self, adapter, salt: b"all")


def the_parent_is_left_out(patch: Patch) -> None:
    def extend(original: Any, self: Any, hashes: list[bytes], root: bytes, tokens: list[int], num_blocks: int) -> None:
        size = self._block_size
        hashes += [root + bytes(tokens[block * size :][:size]) for block in range(len(hashes), num_blocks)]

    wrap(patch, kv_cache_manager.ChainedHasher, "extend", extend)


def a_reset_does_not_reach_who_runs(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "reset", lambda self: self.pool.reset())


def a_reset_does_not_reach_who_has_no_full_block_yet(patch: Patch) -> None:
    def publish(original: Any, self: Any, seq: Sequence, num_computed: int) -> None:
        table = self._tables[seq.id]
        if not table.hashes and table.num_published > len(table.block_ids):
            table.num_published = 0
        original(self, seq, num_computed)

    wrap(patch, KVCacheManager, "publish", publish)


def nothing_is_left_to_compute(patch: Patch) -> None:
    def find(original: Any, self: Any, seq: Sequence, table: Any) -> list[int]:
        seq.token_ids.append(0)
        blocks: list[int] = original(self, seq, table)
        seq.token_ids.pop()
        return blocks

    wrap(patch, KVCacheManager, "_find_prefix", find)


def an_evicted_block_is_still_found(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


def sharing_takes_no_reference(patch: Patch) -> None:
    def share(original: Any, self: Any, blocks: list[int]) -> None:
        original(self, [block for block in blocks if self.refs[block] == 0])

    wrap(patch, BlockPool, "share", share)


def a_shared_block_stays_in_the_free_list(patch: Patch) -> None:
    def share(original: Any, self: Any, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    wrap(patch, BlockPool, "share", share)


def the_last_block_is_not_released(patch: Patch) -> None:
    wrap(patch, BlockPool, "release", lambda original, self, blocks: original(self, list(blocks)[1:]))


def a_block_is_released_while_others_hold_it(patch: Patch) -> None:
    def release(original: Any, self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        for block in blocks:
            self.refs[block] = 1
        original(self, blocks)

    wrap(patch, BlockPool, "release", release)


def the_pool_gives_more_than_it_has(patch: Patch) -> None:
    wrap(patch, KVCacheManager, "admit", lambda original, self, seq, spare, **kw: original(self, seq, -1, **kw))


def cached_free_blocks_are_counted_as_free(patch: Patch) -> None:
    def admit(original: Any, self: Any, seq: Sequence, spare: int, *, use_cache: bool = True) -> Any:
        table = self._tables.get(seq.id) or kv_cache_manager.BlockTable(self._root(seq))
        cached = self._find_prefix(seq, table) if use_cache else []
        return original(self, seq, -sum(self.pool.refs[block] == 0 for block in cached), use_cache=use_cache)

    wrap(patch, KVCacheManager, "admit", admit)


def the_new_block_comes_one_token_late(patch: Patch) -> None:
    wrap(patch, KVCacheManager, "extend", lambda original, self, seq, tokens: original(self, seq, tokens - 1))


def new_blocks_are_not_sent(patch: Patch) -> None:
    def columns(original: Any, self: StepPlan, step: int, finished: list[int]) -> SchedulerOutput:
        self._grown.clear()
        plan: SchedulerOutput = original(self, step, finished)
        return plan

    wrap(patch, StepPlan, "columns", columns)


# -------------------------------------------------------------------- the step


def one_token_too_many_in_a_step(patch: Patch) -> None:
    def init(original: Any, self: StepPlan, tokens: int, max_new: int) -> None:
        original(self, tokens + 1, max_new)

    wrap(patch, StepPlan, "__init__", init)


def one_sequence_too_many_in_a_step(patch: Patch) -> None:
    def init(original: Any, self: StepPlan, tokens: int, max_new: int) -> None:
        original(self, tokens, max_new + 1)

    wrap(patch, StepPlan, "__init__", init)


def waiting_before_running(patch: Patch) -> None:
    def schedule_running(original: Any, self: Scheduler, plan: StepPlan, yielding: list[Sequence]) -> None:
        if not plan.new:
            running = list(self.running)
            self._schedule_waiting(plan)
            started, self.running = [seq for seq in self.running if seq not in running], running
            original(self, plan, yielding)
            self.running = sorted(self.running + started, key=self.waiting.rank)

    wrap(patch, Scheduler, "_schedule_running", schedule_running)


def whoever_fits_is_served(patch: Patch) -> None:
    def schedule_waiting(original: Any, self: Scheduler, plan: StepPlan) -> None:
        original(self, plan)
        if len(self.waiting) > 1 and plan.max_new > 0:
            head = next(self.waiting.candidates())
            if head.resume_after <= self._seen:
                self.waiting.remove(head)
                original(self, plan)
                self.waiting.push(head)

    wrap(patch, Scheduler, "_schedule_waiting", schedule_waiting)


def priority_is_ignored(patch: Patch) -> None:
    patch.setitem(queues.POLICIES, "priority", queues.POLICIES["fcfs"])


def the_highest_class_is_preempted(patch: Patch) -> None:
    def victim(original: Any, self: Scheduler, seq: Sequence, place: int) -> Sequence | None:
        behind = self.running[place + 1 :]
        return min(behind, key=lambda seq: (self.waiting.standing(seq), -seq.state.arrival)) if behind else None

    wrap(patch, Scheduler, "_victim", victim)


def a_scheduled_sequence_is_preempted(patch: Patch) -> None:
    wrap(patch, Scheduler, "_reserve_blocks", lambda original, self, seq, place, plan: original(self, seq, -1, plan))


def a_sequence_resumes_with_an_unseen_token(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, seq: Sequence) -> None:
        original(self, seq)
        seq.resume_after = 0

    wrap(patch, Scheduler, "_preempt", preempt)


def a_sequence_resumes_without_what_it_generated(patch: Patch) -> None:
    def as_new(original: Any, self: Sequence, block_ids: list[int]) -> Any:
        new = original(self, block_ids)
        return replace(new, token_ids=new.token_ids[: new.num_prompt_tokens])

    wrap(patch, Sequence, "as_new", as_new)


def a_preempted_sequence_counts_as_computed(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, seq: Sequence) -> None:
        computed = seq.num_computed
        original(self, seq)
        seq.num_computed = computed

    def start(original: Any, self: Scheduler, seq: Sequence, cached: int, plan: StepPlan) -> None:
        original(self, seq, max(cached, min(seq.num_computed, len(seq.token_ids) - 1)), plan)

    wrap(patch, Scheduler, "_preempt", preempt)
    wrap(patch, Scheduler, "_start", start)


def the_worker_is_not_told_who_left(patch: Patch) -> None:
    def leave(original: Any, self: Scheduler, seq: Sequence) -> None:
        original(self, seq)
        self._finished.pop()

    wrap(patch, Scheduler, "_leave_batch", leave)


def a_sequence_draws_in_the_middle_of_its_prompt(patch: Patch) -> None:
    def columns(original: Any, self: StepPlan, step: int, finished: list[int]) -> SchedulerOutput:
        plan: SchedulerOutput = original(self, step, finished)
        return replace(plan, samples=[True] * len(plan.samples))

    wrap(patch, StepPlan, "columns", columns)


# -------------------------------------------------------------------- ends


def one_token_more_than_asked_for(patch: Patch) -> None:
    def open_sequence(original: Any, self: Any, seq_id: int, index: int) -> Sequence:
        seq: Sequence = original(self, seq_id, index)
        seq.limit += 1
        return seq

    wrap(patch, sequence.RequestState, "sequence", open_sequence)


def one_token_less_than_asked_for(patch: Patch) -> None:
    def open_sequence(original: Any, self: Any, seq_id: int, index: int) -> Sequence:
        seq: Sequence = original(self, seq_id, index)
        seq.limit -= seq.limit > len(seq.token_ids) + 1
        return seq

    wrap(patch, sequence.RequestState, "sequence", open_sequence)


def steps_are_scheduled_beyond_the_last_token(patch: Patch) -> None:
    def schedule_running(original: Any, self: Scheduler, plan: StepPlan, yielding: list[Sequence]) -> None:
        limits = [(seq, seq.limit) for seq in self.running]
        for seq, limit in limits:
            seq.limit = limit + 1
        original(self, plan, yielding)
        for seq, limit in limits:
            seq.limit = limit

    wrap(patch, Scheduler, "_schedule_running", schedule_running)


def min_tokens_is_ignored(patch: Patch) -> None:
    patch.setattr(Sequence, "num_generated", property(lambda self: 10**6))


def ignore_eos_is_ignored(patch: Patch) -> None:
    def add(original: Any, self: Scheduler, client_id: str, request: Any) -> None:
        original(self, client_id, replace(request, params=replace(request.params, ignore_eos=False)))

    wrap(patch, Scheduler, "add", add)


def an_aborted_sequence_keeps_its_blocks(patch: Patch) -> None:
    def abort(original: Any, self: Scheduler, client_id: str, key: int) -> None:
        free = self.kv.free
        self.kv.free = lambda seq: None  # type: ignore[method-assign]
        original(self, client_id, key)
        self.kv.free = free  # type: ignore[method-assign]

    wrap(patch, Scheduler, "abort", abort)


def an_abort_forgets_who_waits(patch: Patch) -> None:
    def abort(original: Any, self: Scheduler, client_id: str, key: int) -> None:
        state = self._requests.get(client_id, {}).get(key)
        if state is None or all(seq.status is Status.RUNNING for seq in state.open):
            original(self, client_id, key)

    wrap(patch, Scheduler, "abort", abort)


def siblings_are_forgotten(patch: Patch) -> None:
    patch.setattr(sequence.RequestState, "fork", lambda self, ids: [])


def siblings_share_a_seed(patch: Patch) -> None:
    patch.setattr(sequence, "sequence_seed", lambda seed, index: seed)


def a_seed_changes_with_preemption(patch: Patch) -> None:
    ids = count(1)
    patch.setattr(sequence, "sequence_seed", lambda seed, index: seed + (next(ids) > 3))


def prompt_logprobs_from_the_cache(patch: Patch) -> None:
    def admit(original: Any, self: Any, seq: Sequence, spare: int, *, use_cache: bool = True) -> Any:
        return original(self, seq, spare, use_cache=True)

    wrap(patch, KVCacheManager, "admit", admit)


def prompt_logprobs_twice_after_preemption(patch: Patch) -> None:
    def start(original: Any, self: Scheduler, seq: Sequence, cached: int, plan: StepPlan) -> None:
        kept = seq.prompt_logprobs
        original(self, seq, cached, plan)
        seq.prompt_logprobs = kept

    wrap(patch, Scheduler, "_start", start)


def logprobs_of_a_neighbour(patch: Patch) -> None:
    select = ClientOutputs.columns

    def columns(self: Any, *args: Any) -> Any:
        self.positions = list(range(len(self.positions)))
        return select(self, *args)

    patch.setattr(ClientOutputs, "columns", columns)


@pytest.mark.parametrize("plant", faults_of(__name__), ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant: Plant, monkeypatch: Patch) -> None:
    assert caught(plant, monkeypatch)


def test_without_a_fault_the_same_lives_are_well() -> None:
    assert lives() > LIVES

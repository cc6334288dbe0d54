"""Single decisions of the Scheduler: budget, order, preemption, and the columns of its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylm.engine import snapshot
from raylm.engine.queues.base import AGING_S
from raylm.engine.sequence import sequence_seed
from raylm.messages import Logprobs, ModelRunnerOutput, SchedulerOutput
from tests.engine.build import CLIENT, EOS, Engine, crowd, request


def rows(plan: SchedulerOutput) -> list[tuple[int, int, int, bool]]:
    return list(zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, plan.samples, strict=True))


# -------------------------------------------------------------------- catching up


def test_a_prompt_then_one_token_a_step() -> None:
    engine = Engine()
    engine.add([1] * 6)
    first = engine.schedule()
    assert first.step == 1
    assert rows(first) == [(0, 0, 6, True)]
    assert list(first.new[0].token_ids) == [1] * 6
    assert first.new[0].block_ids == [0, 1]
    assert (first.new_block_counts, first.new_block_ids) == ([0], [])
    engine.update(first)
    assert rows(engine.schedule()) == [(0, 6, 1, True)]


def test_what_is_drawn_is_not_appended_to_the_requests_own_prompt() -> None:
    engine, prompt = Engine(), [1] * 6
    engine.add(prompt, n=2, max_tokens=3)
    while engine.scheduler.has_work:
        engine.step()
    assert prompt == [1] * 6


def test_a_long_prompt_is_computed_in_chunks_and_draws_at_its_end() -> None:
    engine = Engine(num_blocks=20, max_num_batched_tokens=16)
    engine.add([1] * 40)
    plans = [engine.schedule() for _ in range(3)]
    assert [rows(plan)[0] for plan in plans] == [(0, 0, 16, False), (0, 16, 16, False), (0, 32, 8, True)]
    assert [len(plan.new) for plan in plans] == [1, 0, 0]


def test_prompt_tokens_whose_log_probabilities_are_asked_for_count_as_several() -> None:
    """Their logits are computed too, which delays the sequences in the same step."""
    engine = Engine(num_blocks=20, max_num_batched_tokens=16)
    engine.add([1] * 6, key=1, prompt_logprobs=1)
    engine.add([1] * 40, key=2, prompt_logprobs=1)
    engine.add([1] * 40, key=3)
    plan = engine.schedule()
    assert rows(plan) == [(0, 0, 2, False)]
    engine = Engine(num_blocks=20, max_num_batched_tokens=17)
    engine.add([1], key=1)
    engine.step()
    engine.add([1] * 6, key=2, prompt_logprobs=1)
    assert [rows(engine.schedule()) for _ in range(3)] == [
        [(0, 1, 1, True), (1, 0, 2, False)],
        [(0, 2, 1, True), (1, 2, 2, False)],
        [(0, 3, 1, True), (1, 4, 2, True)],
    ]


def test_new_blocks_are_sent_when_a_block_border_is_crossed() -> None:
    engine = Engine()
    engine.add([1] * 3)
    engine.add([1] * 2, key=1)
    plans = []
    for _ in range(4):
        plans.append(engine.schedule())
        engine.update(plans[-1])
    assert [plan.new_block_counts for plan in plans] == [[0, 0], [0, 0], [1, 0], [0, 1]]
    assert [plan.new_block_ids for plan in plans] == [[], [], [2], [3]]


def test_a_long_prompt_leaves_a_token_for_each_sequence_behind_it_and_stands_last() -> None:
    engine = Engine(num_blocks=40, max_num_batched_tokens=8, policy="priority")
    for key in (1, 2, 3):
        engine.add([1], key=key, priority=1)
    engine.step()
    engine.add([1] * 30, key=4, priority=0)
    plans = [engine.schedule(), engine.schedule()]
    assert [rows(plan) for plan in plans] == [
        [(0, 1, 1, True), (1, 1, 1, True), (2, 1, 1, True), (3, 0, 5, False)],
        [(0, 2, 1, True), (1, 2, 1, True), (2, 2, 1, True), (3, 5, 5, False)],
    ]


def test_a_long_prompt_gets_a_token_even_if_as_many_are_behind_it_as_the_step_has() -> None:
    engine = Engine(num_blocks=40, max_num_batched_tokens=3, policy="priority")
    for key in (1, 2, 3):
        engine.add([1], key=key, priority=1)
    engine.step()
    engine.scheduler.running[2].limit = 2  # its last token is in flight
    engine.add([1] * 9, key=4, priority=0)
    assert [rows(engine.schedule())[place] for place in (2, 0, 0)] == [(3, n, 1, False) for n in range(3)]


def test_a_long_prompt_of_a_lower_class_yields_to_one_that_waits() -> None:
    engine = Engine(num_blocks=80, max_num_batched_tokens=16, policy="priority")
    engine.add([1], key=0, priority=1, max_tokens=50)
    engine.add([2] * 100, key=1, priority=1)
    engine.step()
    engine.add([3] * 20, key=2, priority=0)
    first, second = engine.schedule(), engine.schedule()
    assert rows(first) == [(0, 1, 1, True), (2, 0, 15, False)]
    assert [row[:3] for row in rows(second)] == [(0, 2, 1), (2, 15, 5), (1, 15, 10)]


def test_waiting_for_long_makes_up_for_the_class_of_a_prompt_that_yields() -> None:
    engine = Engine(num_blocks=80, max_num_batched_tokens=16, policy="priority")
    engine.add([1], key=0, priority=1, max_tokens=50)
    engine.add([2] * 100, key=1, priority=1)
    engine.step()
    late = replace(request([3] * 20, 2, priority=0), arrival_time=AGING_S + 1)
    engine.scheduler.add(CLIENT, late)
    assert rows(engine.schedule()) == [(0, 1, 1, True), (1, 15, 15, False)]


def test_no_more_sequences_than_seats() -> None:
    engine = Engine(max_num_seqs=2)
    for key in range(3):
        engine.add([1], key=key)
    assert engine.schedule().seq_ids == [0, 1]
    assert engine.scheduler.stats().waiting == 1


def test_nobody_overtakes_the_head_of_the_line() -> None:
    engine = Engine(num_blocks=4)
    engine.add([1] * 8, key=0)
    engine.step()
    engine.add([2] * 12, key=1)
    engine.add([3], key=2)
    assert engine.schedule().seq_ids == [0]
    assert engine.scheduler.stats().waiting == 2


def test_a_sequence_is_admitted_only_if_every_running_one_may_still_grow_by_a_block() -> None:
    engine = Engine(num_blocks=4)
    engine.add([1] * 8, key=0)
    engine.add([2] * 5, key=1)
    assert engine.schedule().seq_ids == [0], "two free blocks suffice, but leave none to grow"


def test_nothing_to_do() -> None:
    assert Engine().scheduler.schedule() is None


# -------------------------------------------------------------------- two steps in flight


def test_the_second_step_counts_on_a_token_that_nobody_has_seen() -> None:
    engine = Engine()
    engine.add([1] * 5)
    first, second = engine.schedule(), engine.schedule()
    assert rows(second) == [(0, 5, 1, True)]
    engine.update(first, 3)
    engine.update(second, 4)
    assert list(engine.scheduler.running[0].token_ids) == [1] * 5 + [3, 4]


def test_nothing_is_scheduled_beyond_the_last_token() -> None:
    engine = Engine()
    engine.add([1] * 5, max_tokens=2)
    first, second = engine.schedule(), engine.schedule()
    assert engine.scheduler.schedule() is None
    engine.update(first, 3)
    assert engine.scheduler.schedule() is None
    out = engine.update(second, 4)
    assert out is not None
    assert (out.token_ids, out.finish_reasons) == ([4], ["length"])
    engine.kv.check_idle()


def test_one_step_is_wasted_at_eos() -> None:
    engine = Engine()
    engine.add([1] * 5)
    first, second = engine.schedule(), engine.schedule()
    out = engine.update(first, EOS)
    assert out is not None
    assert (out.token_ids, out.finish_reasons, out.stop_reasons) == ([EOS], ["stop"], [None])
    assert engine.scheduler.schedule() is None
    assert engine.update(second, 4) is None, "a token after the end belongs to no request"
    engine.kv.check_idle()
    engine.add([1], key=1)
    assert engine.schedule().finished == [0], "its row is free in the next step"


def test_a_preempted_sequence_waits_for_its_token_in_flight_and_comes_back_with_it() -> None:
    engine = Engine(num_blocks=4)
    crowd(engine, 6, 5, max_tokens=[6, 100])
    in_flight = [engine.schedule(), engine.schedule()]
    while engine.scheduler.counters.preemptions == 0:
        engine.update(in_flight.pop(0), 5, 5)
        in_flight.append(engine.schedule())
    victim = next(engine.scheduler.waiting.candidates())
    known = list(victim.token_ids)
    assert victim.key == 1
    assert in_flight[1].finished == [1]
    assert victim.num_tokens == len(known) + 1
    engine.update(in_flight[0], 5, 9)
    assert list(victim.token_ids) == [*known, 9]
    engine.update(in_flight[1])
    while not (plan := engine.schedule()).new:
        engine.update(plan)
    assert list(plan.new[0].token_ids) == [*known, 9]
    assert plan.new[0].num_prompt_tokens == 5


def test_generated_blocks_are_found_while_their_sequence_still_runs() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 3)
    for token in (6, 7, 8, 9):
        engine.step(token)
    engine.add([1, 1, 1, 6, 7, 8], key=1)
    assert rows(engine.schedule())[1] == (1, 4, 2, True)


def test_results_are_taken_in_the_order_of_the_steps() -> None:
    engine = Engine()
    engine.add([1] * 5)
    first, second = engine.schedule(), engine.schedule()
    with pytest.raises(AssertionError, match="result 2 of step 2 after 0"):
        engine.update(second)
    with pytest.raises(AssertionError, match="result 2 of step 1 after 0"):
        engine.scheduler.update(first, ModelRunnerOutput(2, [0], [1], [5]))
    engine.update(first)
    engine.update(second)


# -------------------------------------------------------------------- several sequences of one request


def test_sequences_of_a_request_share_its_prompt() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 9, n=3)
    first = engine.schedule()
    assert first.seq_ids == [0]
    engine.update(first)
    plan = engine.schedule()
    assert rows(plan) == [(0, 9, 1, True), (1, 8, 1, True), (2, 8, 1, True)]
    assert [new.block_ids[:2] for new in plan.new] == [[0, 1], [0, 1]]
    assert [new.seed for new in plan.new] == [sequence_seed(7, 1), sequence_seed(7, 2)]
    out = engine.update(plan)
    assert out is not None
    assert (out.indexes, out.cached_tokens) == ([0, 1, 2], [0, 8, 8])
    assert out.stats.counters.prompt_tokens == 9, "counted once"


def test_sequences_start_although_the_first_ends_at_once() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 9, n=2, max_tokens=1)
    engine.step()
    out = engine.step()
    assert out is not None
    assert (out.indexes, out.finish_reasons) == ([1], ["length"])
    assert not engine.scheduler.has_work


def test_seeds() -> None:
    assert sequence_seed(42, 0) == 42
    assert sequence_seed(-3, 0) == -3
    seeds = {sequence_seed(seed, index) for seed in range(-50, 50) for index in range(128)}
    assert len(seeds) == 100 * 128
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert sequence_seed(0, 1) == 0xE220A8397B1DCDAF - 2**64, "the first number of SplitMix64 from 0, as published"


def test_a_request_without_a_seed_gets_one_and_keeps_it() -> None:
    engine = Engine()
    for key in (0, 1):
        engine.add([1] * 5, key=key, seed=None)
    seeds = [new.seed for new in engine.schedule().new]
    assert seeds[0] != seeds[1]
    seq = engine.scheduler.running[0]
    assert seq.as_new([]).seed == seeds[0]


# -------------------------------------------------------------------- logprobs, counts


def test_prompt_logprobs_are_computed_at_every_position_and_once() -> None:
    engine = Engine(num_blocks=20, max_num_batched_tokens=128)
    engine.add([1] * 20, key=0)
    engine.step()
    engine.step()
    engine.add([1] * 20, key=1, prompt_logprobs=0, n=2)
    plan = engine.schedule()
    assert plan.num_computed[plan.seq_ids.index(plan.new[0].seq_id)] == 0, "no prefix hit"
    part = [Logprobs([0] + [1] * 14, [1] * 14, [-1.0] * 14, [0] + [1] * 14)]
    out = engine.update(plan, prompt_logprobs=[(1, part[0])])
    assert out is not None
    assert out.prompt_logprobs == []
    part.append(Logprobs([1] * 5, [1] * 5, [-2.0] * 5, [1] * 5))
    out = engine.update(engine.schedule(), prompt_logprobs=[(1, part[1])])
    assert out is not None
    assert out.prompt_logprobs == [
        (1, Logprobs([0] + [1] * 19, [1] * 19, [-1.0] * 14 + [-2.0] * 5, [0] + [1] * 19)),
    ]
    sibling = engine.schedule().new[0]
    assert sibling.params.prompt_logprobs is None
    assert engine.scheduler.running[1].as_new([]).params.prompt_logprobs is None, "not again after preemption"


def test_counts() -> None:
    engine = Engine(num_blocks=20)
    engine.add([1] * 9, key=0, max_tokens=3)
    engine.add([2] * 5, key=1, max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.add([1] * 10, key=2)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 0, 4)
    assert (stats.counters.prompt_tokens, stats.counters.generation_tokens) == (24, 8)
    assert (stats.counters.prefix_queries, stats.counters.prefix_hits) == (24, 8)
    assert stats.counters.step_tokens == (9 + 5) + 2 + 2 + (1 + 2)
    assert [*stats.counters.steps_by_tokens[:4]] == [0, 3, 1, 0], "for up to 1, 8, 16, 32 tokens"
    assert stats.kv_usage == (2 + 3) / 20


def test_clients_get_their_own_entries_and_logprobs() -> None:
    engine = Engine(num_blocks=20)
    engine.scheduler.add("a", request([1], 0, logprobs=0))
    engine.scheduler.add("b", request([1], 0))
    engine.scheduler.add("a", request([1], 1, logprobs=1))
    plan = engine.schedule()
    logprobs = Logprobs([1, 0, 2], [7, 9, 6], [-0.1, -0.2, -0.3], [1, 0, 2])
    news = engine.scheduler.update(plan, ModelRunnerOutput(1, [0, 1, 2], [1, 1, 1], [7, 8, 9], logprobs))
    assert (news["a"].keys, news["a"].token_ids, news["a"].logprobs) == (
        [0, 1],
        [7, 9],
        Logprobs([1, 2], [7, 9, 6], [-0.1, -0.2, -0.3], [1, 2]),
    )
    assert (news["b"].keys, news["b"].token_ids, news["b"].logprobs) == ([0], [8], None)


# -------------------------------------------------------------------- snapshots


def test_a_snapshot_lists_so_many_blocks_however_large_the_pool_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_LISTED", 7)
    engine = Engine(num_blocks=40, max_num_batched_tokens=200)
    engine.add(list(range(40)), key=1, max_tokens=1)
    while engine.scheduler.has_work:
        engine.step()
    cached = engine.scheduler.snapshot()
    assert (len(cached.cached), cached.left_out) == (7, 3)
    engine.add([50] * 20, key=2)
    engine.add([60] * 20, key=3)
    engine.step()
    both = engine.scheduler.snapshot()
    held = [len(engine.scheduler.kv.block_ids(seq)) for seq in engine.scheduler.running]
    assert [len(blocks) for blocks in both.block_ids] == [held[0], 7 - held[0]]
    assert both.left_out == sum(held) - 7 + 10
    assert both.cached == []

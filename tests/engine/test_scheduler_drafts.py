"""The Scheduler with draft tokens: several tokens from one step, and blocks for tokens that may come."""

from __future__ import annotations

from raylm.messages import ModelRunnerOutput
from tests.engine.build import CLIENT, EOS, Engine


def test_several_tokens_of_a_step_are_one_entry_up_to_the_end() -> None:
    engine = Engine(speculative_tokens=2)
    engine.add([1] * 3, key=0)
    engine.add([2] * 3, key=1)
    plan = engine.schedule()
    result = ModelRunnerOutput(1, [0, 1], [3, 3], [5, EOS, 5, 6, 6, 6], drafted_tokens=4)
    news = engine.scheduler.update(plan, result)[CLIENT]
    assert (news.keys, news.token_counts, news.token_ids) == ([0, 1], [2, 3], [5, EOS, 6, 6, 6])
    assert news.finish_reasons == ["stop", None]
    counted = news.stats.counters
    assert (counted.drafted_tokens, counted.accepted_tokens, counted.generation_tokens) == (4, 4, 5)


def test_blocks_are_reserved_for_all_drafts_of_the_steps_in_flight() -> None:
    """With blocks of 4 tokens: 3 known tokens and 1 + 5 tokens in each of two steps need four blocks."""
    engine = Engine(num_blocks=20, speculative_tokens=5)
    engine.add([1] * 3)
    engine.step()
    assert engine.schedule().new_block_counts == [2]  # position 3 and five drafts
    assert engine.schedule().new_block_counts == [1]  # at most 4 + 6 are known, the last draft is at 14


def test_no_block_is_taken_for_drafts_where_others_will_need_it() -> None:
    engine = Engine(num_blocks=5, speculative_tokens=3)
    for key in range(3):
        engine.add([1 + key] * 3, key)
    engine.step()
    plan = engine.schedule()
    assert plan.new_block_ids == []
    assert plan.seq_ids == [0, 1, 2]
    assert engine.scheduler.counters.preemptions == 0


def test_the_next_block_is_there_when_drafts_may_have_filled_the_last() -> None:
    engine = Engine(num_blocks=5, speculative_tokens=2)
    for key in range(3):
        engine.add([1 + key] * 2, key)
    plan = engine.schedule()
    engine.update(plan)
    first = engine.schedule()  # 3 known tokens, room for one draft each
    second = engine.schedule()  # 4 or 5 known tokens: the first sequences get the remaining blocks
    assert (first.new_block_counts, second.seq_ids, second.new_block_counts) == ([0, 0, 0], [0, 1], [1, 1])
    engine.scheduler.update(first, ModelRunnerOutput(2, [0, 1, 2], [2, 1, 2], [5, 5, 5, 5, 5]))
    assert [(seq.num_tokens, seq.num_computed) for seq in engine.scheduler.running] == [(6, 5), (5, 4), (5, 4)]
    assert engine.scheduler.counters.preemptions == 0


def test_the_last_token_of_all_is_not_published_by_a_step_that_found_no_room() -> None:
    engine = Engine(speculative_tokens=4)
    engine.add([1] * 3, max_tokens=5)
    engine.step()
    first, second = engine.schedule(), engine.schedule()
    engine.scheduler.update(first, ModelRunnerOutput(2, [0], [4], [5, 6, 7, 8], drafted_tokens=4))
    engine.scheduler.update(second, ModelRunnerOutput(3, [], [], []))
    engine.add([1, 1, 1, 5, 5, 6, 7, 8, 9])
    assert engine.schedule().num_computed == [4]

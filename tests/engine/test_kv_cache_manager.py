"""KVCacheManager: true prefix hits, allocation without side effects, and freed blocks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.sequence import Sequence
from tests.engine.build import sequence
from tests.engine.integrity import check_kv

BLOCK = 4


def computed(kv: KVCacheManager, seq: Sequence) -> Sequence:
    """Admit a sequence, and mark all of its tokens as computed."""
    assert kv.admit(seq, spare=0) is not None
    seq.num_computed = len(seq.token_ids)
    kv.publish(seq, seq.num_computed)
    return seq


def state(kv: KVCacheManager) -> Any:
    return deepcopy((kv.pool.__dict__, {seq_id: table.block_ids for seq_id, table in kv._tables.items()}))


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_full_blocks_are_shared_and_one_token_is_left_to_compute(length: int, cached: int) -> None:
    kv = KVCacheManager(16, BLOCK)
    first = computed(kv, sequence(list(range(1, 12)), 0))
    second = sequence(list(range(1, length + 1)), 1)
    assert kv.admit(second, spare=0) == cached
    assert kv.block_ids(second)[: cached // BLOCK] == kv.block_ids(first)[: cached // BLOCK]
    assert not set(kv.block_ids(second)[cached // BLOCK :]) & set(kv.block_ids(first))
    check_kv(kv)


def test_a_prefix_is_the_whole_beginning() -> None:
    kv = KVCacheManager(16, BLOCK)
    computed(kv, sequence([1, 1, 1, 1, 2, 2, 2, 2, 3], 0))
    assert kv.admit(sequence([9, 1, 1, 1, 2, 2, 2, 2, 3], 1), spare=0) == 0, "equal second block, other first one"
    assert kv.admit(sequence([1, 1, 1, 1, 3, 2, 2, 2, 3], 2), spare=0) == 4


@pytest.mark.parametrize("cached", range(14))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_how_much_of_a_prompt_is_cached_is_found_without_hashing_all_of_it(cached: int, prefix_caching: bool) -> None:
    kv = KVCacheManager(600, BLOCK, prefix_caching)
    if cached:
        computed(kv, sequence(list(range(cached * BLOCK)), 0))
    for number, length in enumerate([1, 4, 5, 20, 53, 2000], start=1):
        waiting = sequence(list(range(cached * BLOCK)) + [7000] * length, number)
        assert kv.num_cached_blocks(waiting) == (cached if prefix_caching else 0)
        assert len(kv._tables[waiting.id].hashes) <= 2 * cached + 1
        assert kv.admit(waiting, spare=0) == (BLOCK * cached if prefix_caching else 0)
        kv.free(waiting)


@pytest.mark.parametrize(("one", "other", "cached"), [("a", "a", 4), ("a", "b", 0), ("a", None, 0), (None, "None", 0)])
def test_salts_do_not_see_each_other(one: str | None, other: str | None, cached: int) -> None:
    kv = KVCacheManager(16, BLOCK)
    computed(kv, sequence([1] * 6, 0, salt=one))
    assert kv.admit(sequence([1] * 6, 1, salt=other), spare=0) == cached


def test_partial_blocks_and_unknown_tokens_are_not_published() -> None:
    kv = KVCacheManager(16, BLOCK)
    seq = sequence([1] * 7, 0)
    kv.admit(seq, spare=0)
    kv.publish(seq, 8)  # the eighth token is not drawn yet
    assert kv.admit(sequence([1] * 20, 1), spare=0) == 4
    seq.token_ids.append(1)
    kv.publish(seq, 8)
    assert kv.admit(sequence([1] * 20, 2), spare=0) == 8


def test_nothing_is_found_with_prefix_caching_off() -> None:
    kv = KVCacheManager(16, BLOCK, prefix_caching=False)
    kv.free(computed(kv, sequence([1] * 9, 0)))
    assert kv.admit(sequence([1] * 9, 1), spare=0) == 0


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_admission_succeeds_or_changes_nothing(spare: int) -> None:
    kv = KVCacheManager(6, BLOCK)
    held = computed(kv, sequence([1] * 8, 0))
    kv.free(computed(kv, sequence([2] * 8, 1)))
    waiting = sequence([2] * 9, 2)  # two cached blocks from the free list, and a new one
    before = state(kv)
    admitted = kv.admit(waiting, spare=spare)
    if spare <= 1:  # four blocks are free
        assert admitted == 8
        assert kv.pool.num_free == 1
    else:
        assert admitted is None
        kv.forget(waiting)
        assert state(kv) == before
    assert kv.block_ids(held) == [0, 1]
    check_kv(kv)


def test_extension_succeeds_or_changes_nothing() -> None:
    kv = KVCacheManager(3, BLOCK)
    seq = computed(kv, sequence([1] * 4, 0))
    assert kv.extend(seq, 4) == []
    before = state(kv)
    assert kv.extend(seq, 13) is None
    assert state(kv) == before
    assert kv.extend(seq, 12) == [1, 2]
    check_kv(kv)


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    kv = KVCacheManager(5, BLOCK)
    kv.free(computed(kv, sequence(list(range(1, 17)), 0)))
    other = sequence([99] * 12, 1)
    kv.admit(other, spare=0)
    kv.free(other)
    assert kv.admit(sequence(list(range(1, 17)), 2), spare=0) == 8, "the first two of four blocks are left"
    check_kv(kv)


def test_what_a_sequence_computed_outlives_it() -> None:
    kv = KVCacheManager(8, BLOCK)
    seq = sequence([1] * 9, 0)
    kv.admit(seq, spare=0)
    seq.num_computed = 9  # scheduled but not published
    kv.free(seq)
    kv.check_idle()
    assert kv.admit(sequence([1] * 9, 1), spare=0) == 8


def test_distrusted_content_is_not_found_again() -> None:
    kv = KVCacheManager(8, BLOCK)
    bad, good = computed(kv, sequence([1] * 9, 0)), computed(kv, sequence([2] * 9, 1))
    kv.free(bad)
    kv.unpublish(bad)
    kv.free(good)
    assert kv.admit(sequence([1] * 9, 2), spare=0) == 0
    assert kv.admit(sequence([2] * 9, 3), spare=0) == 8
    check_kv(kv)


def test_reset_forgets_what_is_cached_now_and_what_running_sequences_publish_later() -> None:
    kv = KVCacheManager(16, BLOCK)
    running, waiting = computed(kv, sequence([1] * 9, 0)), sequence([1] * 21, 1)
    assert kv.admit(waiting, spare=100) is None  # from here its block hashes are stored
    kv.reset()
    running.token_ids.extend([1] * 8)
    kv.publish(running, 17)
    assert kv.admit(waiting, spare=0) == 0
    check_kv(kv)
    kv.free(running)
    kv.free(waiting)
    kv.check_idle()


def test_reset_reaches_who_waits_and_who_has_no_full_block_yet() -> None:
    kv = KVCacheManager(16, BLOCK)
    running, waiting = computed(kv, sequence([1] * 3, 0)), sequence([1] * 9, 1)
    assert kv.admit(waiting, spare=100) is None
    kv.reset()
    running.token_ids.extend([1, 1])
    kv.publish(running, 5)
    assert kv.admit(waiting, spare=0) == 0


def test_shared_tokens_stay_when_a_sequence_goes() -> None:
    kv = KVCacheManager(16, BLOCK)
    first = computed(kv, sequence([1] * 11, 0))
    assert kv.num_shared_tokens(first) == 0
    second = computed(kv, sequence([1] * 5 + [2] * 9, 1))
    assert kv.num_shared_tokens(first) == kv.num_shared_tokens(second) == 4


def test_usage() -> None:
    kv = KVCacheManager(8, BLOCK)
    computed(kv, sequence([1] * 5, 0))
    assert kv.usage == 0.25


def test_check_sees_a_stray_reference() -> None:
    kv = KVCacheManager(8, BLOCK)
    seq = computed(kv, sequence([1] * 5, 0))
    kv.pool.share([0])
    with pytest.raises(AssertionError, match="references"):
        check_kv(kv)
    kv.free(seq)
    with pytest.raises(AssertionError, match="1 KV blocks are held by no sequence"):
        kv.check_idle()


def test_check_idle_sees_a_table_left_behind() -> None:
    kv = KVCacheManager(8, BLOCK)
    kv.admit(sequence([1] * 5, 3), spare=100)
    with pytest.raises(AssertionError, match=r"sequences \[3\]"):
        kv.check_idle()

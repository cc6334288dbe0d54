"""BlockPool: eviction order, references, publishing, and a check that detects broken states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.engine.block_pool import BlockPool
from tests.engine.integrity import check_pool


def test_blocks_are_handed_out_in_the_order_in_which_they_were_given_up() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    for block in (2, 0, 3, 1):
        pool.publish(block, bytes([block]))
    pool.release([2, 0])
    pool.release([3, 1])
    check_pool(pool)
    assert pool.allocate(4) == [2, 0, 3, 1]


def test_a_block_that_cannot_be_found_again_is_handed_out_before_cached_ones() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.publish(0, b"0")
    pool.release([0, 1, 2])
    assert pool.allocate(3) == [2, 1, 0]


def test_a_cached_block_is_taken_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(3)
    for block in pool.allocate(3):
        pool.publish(block, bytes([block]))
    pool.release([0, 1, 2])
    found = pool.find(b"\x01")
    assert found == 1
    pool.share([found])
    check_pool(pool)
    assert pool.num_free == 2
    assert pool.allocate(2) == [0, 2]
    assert pool.find(b"\x00") is None, "an evicted block must not be found"
    assert pool.find(b"\x01") == 1


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    check_pool(pool)


def test_the_first_block_published_under_a_hash_stays() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish(1, b"same")
    pool.publish(0, b"same")
    assert pool.find(b"same") == 1
    check_pool(pool)


@pytest.mark.parametrize("forget", [lambda pool: pool.withdraw([0]), BlockPool.reset], ids=["withdraw", "reset"])
def test_withdrawn_blocks_are_not_found_and_stay_held(forget: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.publish(0, b"0")
    forget(pool)
    assert pool.find(b"0") is None
    assert pool.num_free == 0
    check_pool(pool)


def test_the_cached_blocks_that_are_evicted_last_are_listed() -> None:
    pool = BlockPool(10)
    for block in pool.allocate(6):
        pool.publish(block, bytes([block]))
    pool.release([3, 1, 5, 0])
    assert (pool.cached(2), pool.num_cached) == ([5, 0], 4)
    assert pool.cached(10) == [3, 1, 5, 0]


def lose_a_block(pool: BlockPool) -> None:
    pool.refs[0] = 0


def hold_a_free_block(pool: BlockPool) -> None:
    pool.refs[2] = 1


def misplace_a_hash(pool: BlockPool) -> None:
    pool._by_hash[b"0"] = 1


@pytest.mark.parametrize("damage", [lose_a_block, hold_a_free_block, misplace_a_hash])
def test_check_sees_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.publish(0, b"0")
    check_pool(pool)
    damage(pool)
    with pytest.raises(AssertionError):
        check_pool(pool)


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "publish", "share", "withdraw", "reset"]), st.integers(0, 7)),
        max_size=60,
    )
)
def test_equals_a_plain_list(actions: list[tuple[str, int]]) -> None:
    """Compare with a plain list in eviction order, and plain dictionaries."""
    pool, free, refs, hashes = BlockPool(8), list(range(8)), dict.fromkeys(range(8), 0), dict[int, bytes]()
    for step, (action, block) in enumerate(actions):
        if action == "allocate" and free:
            taken = free.pop(0)
            hashes.pop(taken, None)
            refs[taken] = 1
            assert pool.allocate(1) == [taken]
        elif action == "release" and refs[block]:
            pool.release([block])
            refs[block] -= 1
            if refs[block] == 0:
                free.insert(len(free) if block in hashes else 0, block)
        elif action == "publish" and refs[block] and block not in hashes:
            hashes[block] = bytes([step])
            pool.publish(block, hashes[block])
        elif action == "share" and block in hashes:
            assert pool.find(hashes[block]) == block
            pool.share([block])
            if refs[block] == 0:
                free.remove(block)
            refs[block] += 1
        elif action == "withdraw":
            pool.withdraw([block])
            hashes.pop(block, None)
        elif action == "reset" and block == 0:
            pool.reset()
            hashes.clear()
        check_pool(pool)
        assert pool.cached(8) == [cached for cached in free if cached in hashes]
        assert pool.num_free == len(free)
        assert pool.refs == list(refs.values())

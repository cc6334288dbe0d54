"""The sizes of the KV pool and of the longest sequence, and refusals with their figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.worker.forecast import forecast_pool
from raylm.worker.kv_cache import GIB, size_pool
from raylm.worker.startup import start_runner
from tests.engine.build import Engine

BLOCK = GIB // 1024


def size(free_gib: float = 8, limit: int | None = 4096, **config: Any) -> tuple[int, int]:
    asked, free = Config.model_validate(config), int(free_gib * GIB)
    found = size_pool(asked, asked.cache.block_size or 16, BLOCK, free, free // 4, limit)
    assert found.block_bytes == BLOCK
    return found.num_blocks, found.max_model_len


def test_the_share_of_the_free_memory_is_the_most_by_default() -> None:
    assert size() == (2048, 4096)


def test_a_pool_is_by_default_no_larger_than_sequences_have_a_use_for() -> None:
    assert size(scheduler={"max_num_seqs": 2}, max_model_len=320) == ((2 + 16) * 20 + 2, 320)
    assert size(scheduler={"max_num_seqs": 2}, limit=320, cache={"block_size": 32}) == ((2 + 16) * 10 + 2, 320)
    assert size(scheduler={"max_num_seqs": 2}, limit=320, cache={"prefix_caching": False}) == (2 * 20 + 2, 320)
    assert size(scheduler={"max_num_seqs": 2}, limit=320, cache={"memory_gib": 3}) == (3072, 320)
    assert size(scheduler={"max_num_seqs": 1}, limit=1, cache={"prefix_caching": False}) == (2, 1)


@pytest.mark.parametrize("replicas", [1, 3, {"min": 1, "max": 3}])
def test_pools_of_engines_that_start_at_the_same_moment_fit_together(
    monkeypatch: pytest.MonkeyPatch, replicas: object
) -> None:
    """All engines see the same free memory, because none has written to its pool yet."""
    monkeypatch.setattr("raylm.worker.kv_cache.available_memory", lambda: GIB // 8)
    config = Config.model_validate({"device": "cpu", "engine": {"replicas": replicas}})
    engines = config.engine.max_replicas
    _, info = start_runner(config)
    found = forecast_pool(config, resolve("embedded"), "cpu").pool
    most = 0.4 * GIB / 8
    assert most / 2 < engines * info.kv_cache_bytes <= most
    assert engines * found.num_blocks * found.block_bytes <= most


@given(
    block=st.integers(1, GIB), free=st.integers(0, 1 << 40), limit=st.integers(1, 1 << 20) | st.none(),
    seqs=st.integers(1, 2048), caching=st.booleans(), size=st.sampled_from([16, 32, 64]),
)  # fmt: skip
def test_of_any_model_the_pool_fits_its_sequences_or_the_memory(
    block: int, free: int, limit: int | None, seqs: int, caching: bool, size: int
) -> None:
    cache = {"block_size": size, "prefix_caching": caching}
    config = Config.model_validate({"scheduler": {"max_num_seqs": seqs}, "cache": cache})
    if free // 2 < 2 * block:
        with pytest.raises(ConfigError, match="smallest pool"):
            size_pool(config, size, block, free, free // 2, limit)
        return
    found = size_pool(config, size, block, free, free // 2, limit)
    taken = found.num_blocks * block
    assert taken <= free // 2
    if limit is None:
        assert taken + block > free // 2
        return
    running, cached = seqs * limit, 16 * limit * caching  # in tokens
    rounded = 2 * size * seqs + 16 * size
    assert found.num_blocks * size <= running + cached + rounded
    assert found.num_blocks * size >= running + cached or taken + block > free // 2


@settings(deadline=None)
@given(seqs=st.integers(1, 6), longest=st.integers(2, 60), data=st.data())
def test_without_a_cache_all_sequences_grow_to_the_longest_and_none_is_preempted(
    seqs: int, longest: int, data: st.DataObject
) -> None:
    config = {"scheduler": {"max_num_seqs": seqs}, "cache": {"prefix_caching": False}}
    pool = size_pool(Config.model_validate(config), 16, 1, 2000, 2000, longest * 4)  # in blocks of 16; below, of 4
    engine = Engine(pool.num_blocks, 4, longest, max_num_seqs=seqs, max_num_batched_tokens=seqs * longest)
    for key in range(seqs):
        engine.add([5 + key] * data.draw(st.integers(1, longest - 1)), key)
    while engine.scheduler.has_work:
        engine.step()
        assert not engine.scheduler.waiting
    assert engine.scheduler.counters.preemptions == 0


def test_memory_or_blocks_may_be_asked_for() -> None:
    assert size(cache={"memory_gib": 3}) == (3072, 4096)
    assert size(cache={"num_blocks": 7}) == (7, 7 * 16)
    assert size(cache={"num_blocks": 7, "block_size": 64}) == (7, 7 * 64)


def test_the_longest_sequence_is_the_least_of_all_limits() -> None:
    assert size(max_model_len=1000) == (2048, 1000)
    assert size(limit=None) == (2048, 2048 * 16)
    assert size(limit=None, max_model_len=7777) == (2048, 7777)
    assert size(free_gib=0.5) == (128, 2048)


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        ({"max_model_len": 4097}, 8, "max_model_len: 4097 exceeds the 4096 positions"),
        ({"max_model_len": 4000}, 0.5, r"4000 tokens take 0\.24 GiB .* has 0\.12 GiB, which fit 2048 tokens"),
        ({"max_model_len": 33, "cache": {"num_blocks": 2}}, 8, "fit 32 tokens"),
        ({"cache": {"memory_gib": 9}}, 8, r"cache\.memory_gib: a pool of 9\.00 GiB is requested, 8\.00 GiB are free"),
        ({"cache": {"num_blocks": 9000}}, 8, r"cache\.num_blocks: a pool of 8\.79 GiB"),
        ({"cache": {"memory_gib": 0.001}}, 8, r"smallest pool, 2 blocks, takes 0\.002 GiB"),
        ({}, 0.004, "smallest pool"),
        ({}, -1, "smallest pool"),
        ({"cache": {"memory_gib": 1, "num_blocks": 4}}, 8, "cannot both be set"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figures(config: dict[str, Any], free: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(free, **config)

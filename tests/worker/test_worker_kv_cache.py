"""How large the KV pool and the longest sequence become, and what is refused with which figures."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import ConfigError
from raylm.worker.kv_cache import GIB, size_pool

BLOCK = GIB // 1024


def size(free_gib: float = 8, limit: int | None = 4096, **config: Any) -> tuple[int, int]:
    found = size_pool(Config.model_validate(config), BLOCK, int(free_gib * GIB), int(free_gib * GIB / 4), limit)
    assert found.block_bytes == BLOCK
    return found.num_blocks, found.max_model_len


def test_the_share_of_the_free_memory_is_the_default() -> None:
    assert size() == (2048, 4096)


def test_memory_or_blocks_may_be_asked_for() -> None:
    assert size(cache={"memory_gib": 3}) == (3072, 4096)
    assert size(cache={"num_blocks": 7}) == (7, 7 * 16)
    assert size(cache={"num_blocks": 7, "block_size": 64}) == (7, 7 * 64)


def test_the_longest_sequence_is_the_least_of_all_limits() -> None:
    assert size(max_model_len=1000) == (2048, 1000)
    assert size(limit=None) == (2048, 2048 * 16)
    assert size(limit=None, max_model_len=77) == (2048, 77)
    assert size(free_gib=0.5) == (128, 2048)


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        ({"max_model_len": 4097}, 8, "max_model_len: 4097 exceeds the 4096 positions"),
        ({"max_model_len": 4000}, 0.5, r"4000 tokens take 0\.24 GiB .* has 0\.12 GiB, which fit 2048 tokens"),
        ({"max_model_len": 33, "cache": {"num_blocks": 2}}, 8, "fit 32 tokens"),
        ({"cache": {"memory_gib": 9}}, 8, r"cache\.memory_gib: a pool of 9\.00 GiB is asked for, 8\.00 GiB are free"),
        ({"cache": {"num_blocks": 9000}}, 8, r"cache\.num_blocks: a pool of 8\.79 GiB"),
        ({"cache": {"memory_gib": 0.001}}, 8, r"smallest pool, 2 blocks, takes 0\.002 GiB"),
        ({}, 0.004, "smallest pool"),
        ({}, -1, "smallest pool"),
        ({"cache": {"memory_gib": 1, "num_blocks": 4}}, 8, "exclude each other"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figures(config: dict[str, Any], free: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(free, **config)

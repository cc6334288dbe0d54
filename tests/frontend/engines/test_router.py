"""Router: which engine gets a request."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from raylm.errors import EngineUnavailableError
from raylm.frontend.engines.router import CHUNK_TOKENS, MAX_REMEMBERED, NEAR, Router
from raylm.messages import EngineStats
from tests.engine.build import request
from tests.frontend.played_engine import PlayedEngine

KEYS = count()


@pytest.fixture
def router() -> Router:
    return Router(lambda outputs: [], lambda keys, error: None, lambda key: None)


def pick(router: Router, prompt: list[int], salt: str | None = None) -> str:
    """Pick, and keep the request open."""
    asked = request(prompt, next(KEYS), salt=salt)
    engine = router.pick(asked)
    router.send(asked, engine)
    return engine.client.info.engine_id


async def test_requests_spread_by_load(router: Router) -> None:
    for name in "abc":
        router.add(PlayedEngine(name))
    assert Counter(pick(router, [n]) for n in range(30)) == {"a": 10, "b": 10, "c": 10}
    await router.close()


async def test_engine_stats_decide_between_equals(router: Router) -> None:
    for name in "ab":
        router.add(PlayedEngine(name))
    router._engines["a"].stats = EngineStats(running=5)
    assert pick(router, [1]) == "b"
    await router.close()


async def test_equal_beginnings_go_to_the_same_engine_until_it_is_busier(router: Router) -> None:
    for name in "ab":
        router.add(PlayedEngine(name))
    shared = list(range(2 * CHUNK_TOKENS))
    home = pick(router, shared)
    found = [pick(router, [*shared, n]) for n in range(NEAR)]
    assert set(found) == {home}
    assert pick(router, shared) != home, "affinity must not outweigh load"
    await router.close()


async def test_other_salts_share_nothing(router: Router) -> None:
    for name in "ab":
        router.add(PlayedEngine(name))
    shared = list(range(CHUNK_TOKENS))
    home = pick(router, shared, "one")
    assert pick(router, shared, "two") != home
    await router.close()


async def test_memory_of_prompts_is_bounded(router: Router) -> None:
    for name in "ab":
        router.add(PlayedEngine(name))
    for n in range(MAX_REMEMBERED // 8):
        router.pick(request([n] * (16 * CHUNK_TOKENS)))
    assert len(router._prefixes) == MAX_REMEMBERED
    await router.close()


async def test_without_engines_there_is_an_error(router: Router) -> None:
    with pytest.raises(EngineUnavailableError):
        router.pick(request([1]))
    router.add(PlayedEngine("a"))
    await router.close()
    with pytest.raises(EngineUnavailableError):
        router.pick(request([1]))


async def test_one_fingerprint_where_engines_agree_and_no_promise_where_they_differ(router: Router) -> None:
    assert router.fingerprint == ""
    for name in "ab":
        router.add(PlayedEngine(name))
    assert router.fingerprint == "fp_1"
    router.add(PlayedEngine("c", fingerprint="fp_2"))
    assert router.fingerprint.endswith("_varies")
    await router.close()

"""Branches: a prefix that many prompts go on from is worth a copy on another engine."""

from __future__ import annotations

import time

import pytest

from raylm.engine import pack_keys
from raylm.frontend.engines.branches import Branches
from raylm.frontend.engines.router import Router
from raylm.frontend.prompt_state import process
from raylm.messages import BlockChanges, EngineStats, OtherClients
from tests.engine.build import request
from tests.frontend.engines.test_router import fleet, hashes, pick, read, told

SYSTEM = [1] * 512
CHAT = [*SYSTEM, *[2] * 512]


@pytest.fixture
def router() -> Router:
    return Router(process)


def place(router: Router, prompt: list[int]) -> str:
    """Where a prompt would go; nothing is sent."""
    return router.pick(request(prompt)).engine.client.info.engine_id


async def test_a_prefix_that_many_prompts_go_on_from_is_computed_again_where_nothing_waits(router: Router) -> None:
    engines = await fleet(router)
    engines["a"].say(**told(1, stored=hashes(CHAT)))
    await read()
    assert pick(router, [*SYSTEM, *[3] * 200]) == "a", "20 ms of work, which the next one waits for"
    assert place(router, [*SYSTEM, 4]) == "a", "half of the prefix is 26 ms, and as much for who comes next"
    for number in range(50):
        place(router, [*SYSTEM, 10 + number])
    assert place(router, [*SYSTEM, 4]) == "b"
    assert place(router, [*CHAT, 4]) == "a", "nobody else goes on from this chat"
    await router.close()


async def test_where_news_are_old_prompts_only_seem_to_go_on_from_there(router: Router) -> None:
    """Chats that another ingress had the turn before go on from more than what is known here."""
    engines = await fleet(router)
    stats = EngineStats(running=1, places=63, step_s=0.01, token_s=1e-4, others=OtherClients(0, 1))
    for name, engine in engines.items():
        stored = hashes(SYSTEM) if name == "a" else ()
        engine.say(blocks=BlockChanges(1, pack_keys(stored), b""), created=time.time() - 5.0, stats=stats)
    await read()
    router._rendezvous.found = 0.0
    assert {place(router, [*SYSTEM, 10 + number]) for number in range(50)} == {"a"}
    assert pick(router, [*SYSTEM, *[3] * 200]) == "a"
    assert place(router, [*SYSTEM, 4]) == "a"
    await router.close()


async def test_siblings_of_a_burst_wait_for_their_prefix(router: Router) -> None:
    """No engine has told of it yet: that many ask for it at once does not say that more will."""
    await fleet(router)
    assert len({pick(router, [*[7] * 2000, number]) for number in range(16)}) == 1
    await router.close()


def test_only_the_latest_prompts_count() -> None:
    branches = Branches()
    assert [branches.note(5) for _ in range(3)] == [1, 2, 3]
    for block in range(100, 227):
        assert branches.note(block) == 1
    assert branches.note(5) == 1

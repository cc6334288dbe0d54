"""RendezvousHash: ingresses without knowledge of each other send equal prompts to one engine."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from raylm.engine import ChainedHasher, pack_keys
from raylm.frontend.engines.others_load import OthersLoad
from raylm.frontend.engines.rendezvous import RendezvousHash
from raylm.frontend.engines.router import Router
from raylm.frontend.prompt_state import process
from raylm.messages import BlockChanges, EngineStats, OtherClients
from tests.engine.build import request
from tests.frontend.engines.test_router import BLOCK, read
from tests.frontend.played_engine import PlayedEngine
from tests.frontend.prompts import prompt_of

SYSTEM = [1] * 4 * BLOCK
STALE_S = 2.0


async def ingress(rank: int, names: str = "abcdefgh", told: OtherClients | None = None) -> Router:
    """A router with reports that are ``STALE_S`` old: all engines hold SYSTEM, and each has a request of others."""
    router = Router(process, rank=rank)
    hasher, held = ChainedHasher(BLOCK), list[bytes]()
    hasher.extend(held, hasher.root("", None), SYSTEM, len(SYSTEM) // BLOCK)
    stats = EngineStats(running=1, places=63, step_s=0.01, token_s=1e-4, others=told or OtherClients(0, 1))
    for name in names:
        engine = PlayedEngine(name, max_model_len=10_000)
        router.add(engine)
        engine.say(blocks=BlockChanges(0, pack_keys(held), b""), created=time.time() - STALE_S, stats=stats)
    await read()
    return router


async def chosen(routers: list[Router], prompt: list[int]) -> set[str]:
    return {router.pick(request([*prompt, rank])).engine.client.info.engine_id for rank, router in enumerate(routers)}


@pytest.mark.parametrize("known", [[], SYSTEM])
async def test_ingresses_with_old_news_send_one_prefix_to_one_engine(known: list[int]) -> None:
    """Nothing of the prefix is known, or all engines hold its beginning, as with later turns of a chat."""
    routers = [
        await ingress(rank, names) for rank, names in enumerate(["abcdefgh", "hgfedcba", "badcfehg", "cdefghab"])
    ]
    places = Counter[str]()
    for prefix in range(40):
        for router in routers:
            for number in range(10):
                router.pick(request([*SYSTEM, 100 + number]))  # so the router learns that prompts are usually found
        (place,) = await chosen(routers, [*known, *[1000 + prefix] * 2000])
        places[place] += 1
    assert len(places) == 8, "other prefixes go to other engines"
    for router in routers:
        await router.close()


async def test_where_prompts_never_come_again_ingresses_keep_apart() -> None:
    """Routers first expect repeated prompts. Prompts that no engine holds change this."""
    routers = [await ingress(rank) for rank in range(4)]
    assert len(await chosen(routers, [999] * 2000)) == 1
    for number in range(200):
        await chosen(routers, [1000 + number] * 2000)
    apart = [len(await chosen(routers, [2000 + number] * 2000)) for number in range(40)]
    assert min(apart) == 4
    for router in routers:
        await router.close()


async def test_what_only_this_process_has_just_sent_teaches_nothing() -> None:
    """The router's own memory finds later requests of a burst, which says nothing about other ingresses."""
    router = await ingress(0)
    prompt, found = [7] * 2000, []
    for key in range(20):
        asked = request(prompt, key=key)
        router.send(prompt_of(asked), router.pick(asked))
        found.append(router._rendezvous.found)
    assert found[0] < 1.0, "no engine held the first prompt"
    assert set(found) == {found[0]}
    await router.close()


def engines(names: str, others: OthersLoad | None = None) -> list[SimpleNamespace]:
    told = others or OthersLoad(told=OtherClients(0, 1))
    return [SimpleNamespace(client=SimpleNamespace(info=SimpleNamespace(engine_id=n)), others=told) for n in names]


def test_one_engine_more_takes_only_what_is_its_own() -> None:
    rendezvous, few, many = RendezvousHash(), engines("abcdefg"), engines("abcdefgh")
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(8000)]
    before = [few[rendezvous.place([key], 0, few)] for key in keys]  # type: ignore[arg-type, index]
    after = [many[rendezvous.place([key], 0, many)] for key in keys]  # type: ignore[arg-type, index]
    names = [(one.client.info.engine_id, two.client.info.engine_id) for one, two in zip(before, after, strict=True)]
    assert {two for one, two in names if one != two} == {"h"}
    assert all(800 < count < 1200 for count in Counter(two for _, two in names).values())


def test_there_is_nobody_to_meet() -> None:
    rendezvous = RendezvousHash()
    assert rendezvous.place([5, 6], 2, engines("ab")) is None, "all blocks are known"  # type: ignore[arg-type]
    alone = engines("ab", OthersLoad())
    assert rendezvous.place([5, 6], 0, alone) is None, "no other client uses the engines"  # type: ignore[arg-type]

"""Router: the choice of an engine for a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from raylm.engine.block_hashes import ChainedHasher, pack_keys
from raylm.errors import EngineUnavailableError
from raylm.frontend.engines.prompt_blocks import KeptRuns, PromptBlocks
from raylm.frontend.engines.router import Router
from raylm.frontend.prompt_state import PromptState, process
from raylm.messages import BlockChanges, EngineStats, LoRAAdapter, OtherClients
from tests.engine.build import request
from tests.frontend.played_engine import PlayedEngine
from tests.frontend.prompts import prompt_of

BLOCK = 16
KEYS = count()
SENT: dict[int, PromptState] = {}  # filled by ``pick``


@pytest.fixture
def router() -> Router:
    return Router(process)


async def fleet(router: Router, names: str = "ab", *, tells: bool = True) -> dict[str, PlayedEngine]:
    """Ready engines. With ``tells`` they have reported that they hold no block yet."""
    engines = {name: PlayedEngine(name, max_model_len=10_000) for name in names}
    for engine in engines.values():
        router.add(engine)
    for engine in engines.values():
        engine.say(**(block_changes() if tells else {}), stats=EngineStats(places=64, step_s=0.01, token_s=0.0001))
    await read()
    return engines


async def read() -> None:
    """Let the router read the engines' messages."""
    for _ in range(5):
        await asyncio.sleep(0)


def block_changes(number: int = 0, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> dict[str, Any]:
    """The block changes of a message that is created now."""
    return {"blocks": BlockChanges(number, pack_keys(stored), pack_keys(removed)), "created": time.time()}


def hashes(prompt: list[int], salt: str | None = None, adapter_digest: str = "") -> list[bytes]:
    """The hashes of the whole blocks of a prompt, as an engine computes them."""
    hasher, found = ChainedHasher(BLOCK), []
    hasher.extend(found, hasher.root(adapter_digest, salt), prompt, len(prompt) // BLOCK)
    return found


def pick(router: Router, prompt: list[int], salt: str | None = None) -> str:
    """Pick an engine, and keep the request open."""
    asked = request(prompt, next(KEYS), salt=salt)
    route = router.pick(asked)
    SENT[asked.key] = prompt_of(asked)
    router.send(SENT[asked.key], route)
    return route.engine.client.info.engine_id


def _uncached(router: Router, prompt: list[int]) -> dict[str, int]:
    engines = list(router._engines.values())
    found = router._uncached(PromptBlocks(request(prompt), KeptRuns()), engines)
    return {engine.client.info.engine_id: tokens for engine, tokens in zip(engines, found, strict=True)}


def picks(router: Router, prompt: list[int], **fields: Any) -> set[str]:
    """All engines that may be picked, without sending a request."""
    asked = request(prompt, next(KEYS), **fields)
    return {router.pick(asked).engine.client.info.engine_id for _ in range(40)}


async def test_requests_spread_by_load(router: Router) -> None:
    await fleet(router, "abc")
    assert Counter(pick(router, [n]) for n in range(30)) == {"a": 10, "b": 10, "c": 10}
    await router.close()


async def test_prompts_count_by_their_tokens(router: Router) -> None:
    await fleet(router)
    tokens: Counter[str] = Counter()
    for n in range(100):
        length = 3000 if n % 2 else 20
        tokens[pick(router, [n] * length)] += length
    assert max(tokens.values()) <= 1.25 * min(tokens.values())
    await router.close()


async def test_sequences_of_a_request_count(router: Router) -> None:
    await fleet(router)
    many = request([1], next(KEYS), n=8)
    route = router.pick(many)
    router.send(prompt_of(many), route)
    busy = route.engine.client.info.engine_id
    assert picks(router, [2]) == {"a", "b"} - {busy}
    await router.close()


async def test_equals_are_picked_at_random(router: Router) -> None:
    await fleet(router, "abc")
    assert picks(router, [1] * 50) == {"a", "b", "c"}
    await router.close()


async def test_what_others_have_to_do_counts_before_the_own_requests(router: Router) -> None:
    engines = await fleet(router)
    engines["a"].say(**block_changes(1), stats=EngineStats(places=0, running=64, others=OtherClients(10_000, 400)))
    await read()
    assert [pick(router, [n]) for n in range(10)] == ["b"] * 10
    await router.close()


async def test_what_others_had_to_do_is_forgotten_when_it_must_have_been_served(router: Router) -> None:
    now = [1000.0]
    router._clock = lambda: now[0]
    router._rendezvous.found = 0.0  # no prompt is repeated, so ingresses need not meet
    engines = await fleet(router)
    busy = EngineStats(places=64, token_s=0.0001, others=OtherClients(10_000, 1))  # the work of a second
    engines["a"].say(stats=busy, created=1000.0)
    engines["b"].say(stats=EngineStats(places=64, token_s=0.0001, others=OtherClients(0, 1)), created=1000.0)
    await read()
    assert picks(router, [1] * 100) == {"b"}
    now[0] += 2
    assert picks(router, [1] * 100) == {"a"}, "the nearest engine of this ingress"
    await router.close()


async def test_a_slow_engine_gets_less(router: Router) -> None:
    engines = await fleet(router)
    engines["a"].say(stats=EngineStats(places=64, step_s=0.03, token_s=0.0003), created=time.time())
    await read()
    assert Counter(pick(router, [n] * 200) for n in range(40))["a"] in range(8, 15)
    await router.close()


async def test_an_engine_of_unknown_speed_is_taken_to_be_as_fast_as_the_others(router: Router) -> None:
    engines = await fleet(router)
    engines["a"].say(stats=EngineStats(places=64), created=time.time())
    await read()
    assert picks(router, [1] * 200) == {"a", "b"}
    await router.close()


async def test_blocks_that_an_engine_holds_draw_their_prompts(router: Router) -> None:
    engines = await fleet(router)
    prompt = list(range(1000))
    engines["b"].say(**block_changes(1, stored=hashes(prompt)))
    await read()
    assert picks(router, [*prompt, 7]) == {"b"}
    assert router.pick(request([*prompt, 7])).uncached_tokens == 1001 - 1000 // BLOCK * BLOCK
    assert picks(router, [7, *prompt]) == {"a", "b"}
    assert picks(router, prompt, salt="other") == {"a", "b"}
    engines["b"].say(**block_changes(2, removed=hashes(prompt)))
    await read()
    assert picks(router, [*prompt, 7]) == {"a", "b"}
    await router.close()


async def test_affinity_does_not_outweigh_load(router: Router) -> None:
    await fleet(router)
    prompt = list(range(800))
    assert {pick(router, [*prompt, n]) for n in range(200)} == {"a", "b"}
    await router.close()


async def test_own_decisions_count_before_the_engine_has_told_of_them(router: Router) -> None:
    engines = await fleet(router)
    prompt = list(range(2000))
    home = pick(router, prompt)
    assert _uncached(router, [*prompt, 1]) == {name: 1 if name == home else 2001 for name in "ab"}
    key = engines[home].added[0].key
    engines[home].say((key, 0, [5], None), **block_changes(1, stored=hashes(prompt)))
    await read()
    assert router.pick(request([*prompt, 2])).uncached_tokens < 20
    router.leave(SENT[key], abort=True)
    engines[home].say(**block_changes(2, removed=hashes(prompt)))
    await read()
    for added in engines[home].added[1:]:
        router.leave(SENT[added.key], abort=True)
    assert router.pick(request([*prompt, 2])).uncached_tokens == 2001, "blocks of aborted requests are forgotten"
    await router.close()


async def test_a_gap_is_answered_by_asking_for_all_and_nothing_is_believed_until_then(router: Router) -> None:
    engines = await fleet(router)
    prompt = list(range(1000))
    engines["a"].say(**block_changes(2, stored=hashes(prompt)))  # message 1 was lost
    engines["a"].say(**block_changes(3, stored=hashes(prompt)))
    await read()
    assert engines["a"].watched == 2
    assert picks(router, prompt) == {"a", "b"}
    engines["a"].say(**block_changes(0, stored=hashes(prompt)))
    await read()
    assert picks(router, prompt) == {"a"}
    await router.close()


async def test_with_one_engine_nothing_is_hashed_and_nothing_told(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainedHasher, "extend", lambda *args: pytest.fail("a prompt was hashed"))
    engines = await fleet(router, "a", tells=False)
    assert pick(router, list(range(1000))) == "a"
    assert engines["a"].watched == 0
    await fleet(router, "b", tells=False)
    assert engines["a"].watched == 1
    assert pick(router, list(range(1000))) == "b", "no engine has reported a block"
    await router.close()


async def test_adapters_are_told_apart_by_their_content(router: Router) -> None:
    engines = await fleet(router)
    prompt = list(range(1000))
    for name, engine in engines.items():
        engine.say(
            **block_changes(1, stored=hashes(prompt, adapter_digest="old")),
            adapters=(LoRAAdapter("x", "p", digest(name)),),
        )
    await read()
    asked = replace(request(prompt), adapter="x")
    assert {router.pick(asked).engine.client.info.engine_id for _ in range(20)} == {"a"}
    assert picks(router, prompt) == {"a", "b"}
    await router.close()


def digest(engine_id: str) -> str:
    return "old" if engine_id == "a" else "new"


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


async def test_a_new_engine_takes_prompts_over_until_the_queues_are_equal(router: Router) -> None:
    engines = await fleet(router, "a")
    sent = [prompt_of(request([n] * 100, next(KEYS))) for n in range(11)]
    for prompt in sent:
        router.send(prompt, router.pick(prompt.request))
    first = sent[0].request.key
    engines["a"].say((first, 0, [5], None))
    await read()
    old = [prompt.request.key for prompt in sent]
    engines |= await fleet(router, "b")
    assert engines["a"].aborted == old[:5:-1], "the newest request first"
    assert [ids[0] for ids in (asked.prompt_token_ids for asked in engines["b"].added)] == [6, 7, 8, 9, 10], (
        "in the order of arrival"
    )
    moved = [asked.key for asked in engines["b"].added]
    assert not set(moved) & set(old)
    engines["a"].say(*((key, 0, [6], None) for key in old))
    await read()
    assert [prompt.drawn[0] for prompt in sent] == [[5, 6]] + [[6]] * 5 + [[]] * 5, "no tokens from the old engine"
    engines["b"].say(*((key, 0, [7], "length") for key in moved))
    await read()
    assert [list(prompt.drawn[0]) for prompt in sent[6:]] == [[7]] * 5
    await router.close()


async def test_a_new_engine_takes_no_prompt_that_was_sent_with_tokens_or_needs_an_adapter(router: Router) -> None:
    engines = await fleet(router, "a")
    resumed = request([1] * 100, next(KEYS))
    plain = [prompt_of(resumed), prompt_of(request([2] * 100, next(KEYS)))]
    plain[0].drawn[0].append(4)
    router.go_on(plain[0], "fp_1")
    router.send(plain[1], router.pick(plain[1].request))
    adapted = prompt_of(replace(request([3] * 900, next(KEYS)), adapter="tuned"))
    engines["a"].say(adapters=(LoRAAdapter("tuned", "/x"),))
    await read()
    router.send(adapted, router.pick(adapted.request))
    engines |= await fleet(router, "b")
    assert [asked.prompt_token_ids[0] for asked in engines["b"].added] == [2]
    assert {asked.prompt_token_ids[0] for asked in engines["a"].added} == {1, 2, 3}
    await router.close()

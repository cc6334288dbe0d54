"""LoRA adapters in the EngineCore with a fake worker: announcements, ended requests, and separate KV blocks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from raylm.config import CacheConfig, Config, LoRAConfig, SchedulerConfig
from raylm.engine import EngineCore
from raylm.engine.block_hashes import ChainedHasher
from raylm.engine.engine_core import _MOST_LEAVERS
from raylm.engine.outbox import Outbox
from raylm.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from raylm.messages import EngineCoreRequest, LoRAAdapter
from tests.engine.build import request
from tests.engine.running_core import Tokens, collect, running, until
from tests.fakes import FakeExecutor, FakeModel, FakeWorker

ONE, TWO = LoRAAdapter("one", "path/one"), LoRAAdapter("two", "path/two")
PROMPT = [*range(1, 40)]


def config(**lora: Any) -> Config:
    return Config(
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        lora=LoRAConfig(root="/adapters", **lora),
    )


def executor() -> FakeExecutor:
    return FakeExecutor(FakeWorker(num_blocks=64))


def asking(key: int, adapter: str | None, tokens: int = 6) -> EngineCoreRequest:
    made: EngineCoreRequest = request(PROMPT, key, max_tokens=tokens, ignore_eos=True, n=2)
    return replace(made, adapter=adapter)


async def announced(outbox: Outbox) -> list[str]:
    """The adapter names in the next message, which must have some."""
    adapters = (await outbox.get()).adapters
    assert adapters is not None
    return [adapter.name for adapter in adapters]


async def answers(core: EngineCore, names: list[str | None]) -> list[list[int]]:
    """The tokens of the first sequence of a request for each name. All requests are sent at once."""
    outbox = core.connect("asker")
    core.add("asker", [asking(key, name) for key, name in enumerate(names)])
    tokens: Tokens = await collect(outbox, 2 * len(names))
    return [tokens[key, 0] for key in range(len(names))]


def expected(path: str = "") -> list[int]:
    return FakeModel().continuation(PROMPT, 7, 6, path)


async def test_requests_of_one_batch_use_their_own_adapters() -> None:
    async with running(executor(), config()) as core:
        await core.load_adapter(ONE)
        await core.load_adapter(TWO)
        wanted = [expected(), expected(ONE.path), expected(TWO.path)] * 2
        assert await answers(core, [None, "one", "two"] * 2) == wanted
        assert await answers(core, [None, "one", "two"] * 2) == wanted, "with prefix hits"
        assert len({tuple(tokens) for tokens in wanted}) == 3


async def test_a_hash_that_forgets_the_adapter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainedHasher, "root", lambda self, adapter, salt: b"the same for all")
    async with running(executor(), config()) as core:
        await core.load_adapter(ONE)
        assert await answers(core, [None]) == [expected()]
        assert await answers(core, ["one"]) != [expected(ONE.path)]


async def test_every_client_is_told_of_every_change() -> None:
    async with running(executor(), config()) as core:
        early = core.connect("early")
        assert await announced(early) == []
        await core.load_adapter(ONE)
        assert await announced(early) == ["one"]
        late = core.connect("late")
        assert await announced(late) == ["one"]
        await core.load_adapter(ONE)  # already loaded
        await core.load_adapter(TWO)
        assert await announced(early) == await announced(late) == ["one", "two"]
        await core.unload_adapter("one")
        await core.unload_adapter("one")
        assert await announced(early) == await announced(late) == ["two"]


async def test_what_is_not_news_is_not_told_and_merged_news_are_the_newest() -> None:
    async with running(executor(), config()) as core:
        outbox = core.connect("a")
        await core.load_adapter(ONE)
        await core.load_adapter(TWO)
        assert await announced(outbox) == ["one", "two"]
        core.add("a", [asking(1, "one")])
        assert (await outbox.get()).adapters is None


async def test_an_adapter_that_cannot_be_served_leaves_nothing() -> None:
    async with running(executor(), config(max_adapters=1)) as core:
        with pytest.raises(InvalidRequestError, match="'bad' cannot be served"):
            await core.load_adapter(LoRAAdapter("one", "bad"))
        await core.load_adapter(ONE)
        with pytest.raises(OverloadedError, match="1 LoRA adapters are loaded"):
            await core.load_adapter(TWO)
        with pytest.raises(InvalidRequestError, match="'one' is loaded already") as refused:
            await core.load_adapter(LoRAAdapter("one", "path/else"))
        assert refused.value.param == "lora_name"
        assert await answers(core, ["one"]) == [expected(ONE.path)]


async def test_a_name_is_taken_while_it_is_being_loaded() -> None:
    async with running(FakeExecutor(FakeWorker(num_blocks=64), delay_s=0.01), config()) as core:
        first = asyncio.create_task(core.load_adapter(ONE))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="being loaded"):
            await core.load_adapter(LoRAAdapter("one", "path/else"))
        await first


async def test_who_asks_for_what_is_being_loaded_waits_for_it() -> None:
    async with running(FakeExecutor(FakeWorker(num_blocks=64), delay_s=0.01), config()) as core:
        await asyncio.gather(*(core.load_adapter(ONE) for _ in range(3)))
        assert await answers(core, ["one"]) == [expected(ONE.path)]
        bad = LoRAAdapter("two", "bad")
        failures = await asyncio.gather(*(core.load_adapter(bad) for _ in range(3)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [InvalidRequestError] * 3


async def test_without_a_root_nothing_is_loaded() -> None:
    async with running(executor(), Config(cache=CacheConfig(num_blocks=64))) as core:
        with pytest.raises(InvalidRequestError, match=r"lora.root is not set"):
            await core.load_adapter(ONE)


async def test_a_request_for_an_unknown_adapter_gets_its_error() -> None:
    async with running(executor(), config()) as core:
        outbox = core.connect("a")
        await outbox.get()
        core.add("a", [asking(1, "nobody")])
        ((key, error),) = (await outbox.get()).errors
        assert (key, type(error), error.param) == (1, ModelNotFoundError, "model")


async def test_unloading_ends_what_a_client_that_has_left_had_open() -> None:
    """When a client leaves with many requests, only a part of them is ended at once."""
    fake = executor()
    async with running(fake, config()) as core:
        await core.load_adapter(ONE)
        core.connect("leaver")
        core.add("leaver", [asking(key, "one") for key in range(2 * _MOST_LEAVERS)])
        core.drop_client("leaver")
        assert core.scheduler.open_requests("leaver")
        await core.unload_adapter("one")
        assert not core.scheduler.open_requests("leaver")
        assert set(fake.worker.adapters) == {0}
        await until(lambda: not core.has_work)


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
async def test_unloading_ends_running_requests_by_name_and_no_others(delay_s: float) -> None:
    fake = FakeExecutor(FakeWorker(num_blocks=64), delay_s=delay_s)
    async with running(fake, config()) as core:
        await core.load_adapter(ONE)
        outbox = core.connect("a")
        core.add("a", [asking(1, "one", 100), asking(2, None), asking(3, "one", 100)])
        await until(lambda: len(core.scheduler.running) == 6)
        await core.unload_adapter("one")
        assert set(fake.worker.adapters) == {0}
        errors, tokens = {}, []
        while len(tokens) < 6:
            out = await outbox.get()
            errors |= dict(out.errors)
            tokens += [
                t for key, index, t in zip(out.keys, out.indexes, out.token_ids, strict=True) if (key, index) == (2, 0)
            ]
        assert {key: error.message for key, error in errors.items()} == dict.fromkeys(
            (1, 3), "The LoRA adapter 'one' was unloaded while it served this request."
        )
        assert tokens == expected()
        await core.load_adapter(LoRAAdapter("one", "path/new"))
        assert await answers(core, ["one"]) == [expected("path/new")]


async def test_the_same_content_is_found_again_and_another_one_is_not() -> None:
    async with running(executor(), config()) as core:
        outbox = core.connect("a")
        for key, path, cached in ((1, "path/one", 0), (2, "path/one", 32), (3, "path/new", 0)):
            await core.load_adapter(LoRAAdapter("one", path))
            core.add("a", [replace(asking(key, "one"), params=replace(asking(key, "one").params, n=1))])
            found: set[int] = set()
            while core.scheduler.has_work or not found:
                found.update((await outbox.get()).cached_tokens)
            assert found == {cached}
            await core.unload_adapter("one")

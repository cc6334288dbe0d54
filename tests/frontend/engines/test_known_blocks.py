"""KnownBlocks: a router's blocks equal the blocks that the engine holds, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from raylm.config import CacheConfig, Config, SchedulerConfig
from raylm.engine.block_hashes import ChainedHasher, keys_of, pack_keys, unpack_keys
from raylm.engine.block_pool import BlockPool
from raylm.engine.outbox import Outbox
from raylm.frontend.engines.engine_client import LocalEngineClient
from raylm.frontend.engines.routed_engine import KnownBlocks, Route, RoutedEngine
from raylm.messages import BlockChanges, EngineCoreOutputs, EngineInfo, EngineStats
from tests.engine.build import request
from tests.engine.running_core import running, until
from tests.fakes import FakeExecutor, FakeWorker

NEWS = EngineCoreOutputs([], [], [], [], [], [], [], EngineStats())


def held_by(pool: BlockPool) -> set[int]:
    return set(unpack_keys(pack_keys(pool._by_hash)))


def a_hash(rng: random.Random) -> bytes:
    return rng.randrange(40).to_bytes(32, "little")


class Reader:
    """A client of the engine that watches its blocks. It may rejoin, be slow, or lose a message."""

    def __init__(self) -> None:
        self.outbox, self.known = Outbox(), KnownBlocks()
        self.wants_all = True

    async def read(self, lose: bool) -> None:
        self.outbox.put(NEWS)
        blocks = (await self.outbox.get()).blocks
        if blocks is not None and not lose and not self.known.apply(blocks):
            self.wants_all = True


def act(pool: BlockPool, rng: random.Random) -> None:
    held = [block for block, refs in enumerate(pool.refs) if refs]
    kind = rng.randrange(12)
    if kind < 4 and pool.num_free:
        pool.allocate(rng.randint(1, pool.num_free))
    elif kind < 8 and held:
        pool.publish(rng.choice(held), a_hash(rng))
    elif kind < 11 and held:
        pool.release(rng.sample(held, rng.randint(1, len(held))))
    elif kind == 11 and rng.random() < 0.3:
        pool.reset() if rng.random() < 0.3 else pool.withdraw(rng.sample(range(pool.num_blocks), 3))


def tell(pool: BlockPool, readers: list[Reader]) -> None:
    """Send changes as an EngineCore does: first the pending changes, then all blocks to readers that ask for them."""
    changes = pool.take_changes()
    for reader in readers:
        if reader.outbox.is_watching:
            reader.outbox.note_blocks(changes)
    for reader in readers:
        if reader.wants_all:
            reader.outbox.watch(pool.watch())
            reader.wants_all = False


async def live(seed: int, steps: int) -> int:
    """Random steps, lost messages, rejoining clients and restarted engines. Returns the number of comparisons."""
    rng, compared = random.Random(seed), 0
    pool, readers = BlockPool(12), [Reader() for _ in range(3)]
    for _ in range(steps):
        act(pool, rng)
        tell(pool, readers)
        for reader in readers:
            if rng.random() < 0.4:
                lost = rng.random() < 0.05
                await reader.read(lost)
                if not lost and reader.known.told is not None and not reader.wants_all:
                    # The next message reveals a lost message. Until then the reader may be wrong.
                    compared += 1
                    reader_is_whole = reader.known._number == reader.outbox._number
                    assert not reader_is_whole or reader.known.told == held_by(pool)
            if rng.random() < 0.01:
                readers[readers.index(reader)] = Reader()
        if rng.random() < 0.001:
            pool, readers = BlockPool(12), [Reader() for _ in readers]  # another id, so routers start again
    return compared


@pytest.mark.parametrize("seed", range(20))
async def test_after_any_steps_gaps_and_restarts_nothing_false_is_believed(seed: int) -> None:
    assert await live(seed, 1500) > 500


@pytest.mark.long
async def test_after_a_million_steps_nothing_false_is_believed() -> None:
    assert await live(99, 1_000_000) > 300_000


async def test_what_is_held_for_a_slow_client_is_bounded_by_the_pool() -> None:
    rng, pool, outbox = random.Random(1), BlockPool(8), Outbox()
    outbox.watch(pool.watch())
    for number in count():
        block = pool.allocate(1)[0]
        pool.publish(block, number.to_bytes(32, "little"))
        pool.release([block])
        outbox.note_blocks(pool.take_changes())
        assert len(outbox._changes) <= 2 * pool.num_blocks
        if number > 200 + rng.randrange(5):
            return


def changes(number: int, *stored: bytes) -> BlockChanges:
    return BlockChanges(number, pack_keys(stored), b"")


def test_before_all_was_told_differences_say_nothing() -> None:
    known = KnownBlocks()
    assert known.apply(changes(5, b"a" * 32))
    assert known.told is None
    assert known.apply(changes(0))
    assert not known.apply(changes(2, b"a" * 32))
    assert known.told is None


def test_matched_is_the_longest_beginning_told_or_on_its_way() -> None:
    rng = random.Random(3)
    for _ in range(300):
        known, blocks = KnownBlocks(), [rng.getrandbits(64) for _ in range(rng.randint(0, 40))]
        known.told = set(blocks[: rng.randint(0, len(blocks))])
        on_its_way = blocks[: rng.randint(0, len(blocks))]
        known.expect(1, on_its_way)
        assert known.num_matched(blocks) == max(len(known.told), len(on_its_way))
        known.settle(1, on_its_way)
        assert known.num_matched(blocks) == len(known.told)
        assert not known._expected


def test_siblings_expect_their_blocks_until_the_last_of_them_has_begun() -> None:
    known = KnownBlocks()
    known.told = set()
    for key in (1, 2):
        known.expect(key, [10, 20])
    known.settle(1, [10, 20])
    assert known.num_matched([10, 20]) == 2
    known.settle(2, [10, 20])
    assert known.num_matched([10, 20]) == 0


async def test_a_live_engine_is_believed_rightly_by_who_asks_and_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.engine.engine_core.TELL_EVERY_S", 0.0)
    settings = Config(
        cache=CacheConfig(num_blocks=24), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    )
    rng, worker = random.Random(5), FakeWorker(num_blocks=24)
    async with running(FakeExecutor(worker), settings) as core:
        info = EngineInfo("a", 256, worker.start())
        asking, idle = (LocalEngineClient(core, info) for _ in range(2))
        pool, routed = core.scheduler.kv.pool, [RoutedEngine(asking), RoutedEngine(idle)]
        assert pool._changes is None, "no client watches, so the pool records no changes"
        for engine in routed:
            engine.watch()
        for key in _in_turn(30):
            prompt = [rng.randrange(3) for _ in range(16)] * rng.randint(1, 5)
            asking.add(request(prompt, key, max_tokens=rng.randint(1, 30), ignore_eos=True))
            if rng.random() < 0.5:
                await until(lambda: not core.scheduler.has_work and not core._in_flight)
                for engine in routed:
                    await _read_all(engine)
                    assert engine.blocks.told == held_by(pool)
        await asking.close()
        await idle.close()
        core._note_blocks()
        assert pool._changes is None


def _in_turn(number: int) -> Iterator[int]:
    yield from range(number)


async def _read_all(engine: RoutedEngine) -> None:
    client = engine.client
    assert isinstance(client, LocalEngineClient)
    while client._outbox._held is not None or client._outbox._changes:
        engine.on_outputs(await client._outbox.get(), now=0.0)


async def test_who_has_no_requests_is_told_of_the_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.engine.engine_core.TELL_EVERY_S", 0.0)
    worker = FakeWorker(num_blocks=64)
    async with running(FakeExecutor(worker, delay_s=0.001), Config(cache=CacheConfig(num_blocks=64))) as core:
        info = EngineInfo("a", 256, worker.start())
        busy, idle = (LocalEngineClient(core, info) for _ in range(2))
        engine = RoutedEngine(idle)
        engine.watch()
        busy.add(request([1] * 100, 1, max_tokens=20, ignore_eos=True, n=3))
        seen = set()
        while engine.stats.others.sequences or len(seen) < 2:
            outputs = await idle._outbox.get()
            engine.on_outputs(outputs, now=outputs.created)
            seen.add(engine.stats.others.sequences)
        assert max(seen) in (2, 3)
        assert engine.stats.others.queued_tokens == 0
        assert engine.others.told_at == outputs.created > 0


async def test_others_are_told_of_an_added_request_before_the_step_under_way_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylm.engine.engine_core.TELL_ADDED_S", 0.0)
    worker = FakeWorker(num_blocks=64)
    async with running(FakeExecutor(worker, delay_s=0.01), Config(cache=CacheConfig(num_blocks=64))) as core:
        info = EngineInfo("a", 256, worker.start())
        busy, idle = (LocalEngineClient(core, info) for _ in range(2))
        idle.watch_blocks()
        busy.add(request([1] * 100, 1, max_tokens=2, ignore_eos=True))
        await until(lambda: bool(core._in_flight))
        await idle._outbox.get()
        steps = core.scheduler.stats().steps
        busy.add(request([1] * 70, 2, max_tokens=2, ignore_eos=True))
        async with asyncio.timeout(300):
            told = (await idle._outbox.get()).stats
        assert (told.steps, told.others.sequences, told.others.queued_tokens) == (steps, 2, 99 + 69)
        assert busy._outbox._held is None or busy._outbox._held.stats.others.sequences == 0


def test_an_open_request_counts_until_its_first_token_and_its_end() -> None:
    engine = RoutedEngine(client=None)  # type: ignore[arg-type]
    engine.begin(1, Route(engine, 2, 300, (7, 8), since=10.0))
    engine.begin(2, Route(engine, 1, 50, since=10.0))
    assert (engine.sequences, engine.queued_tokens) == (3, 350)
    engine.on_outputs(EngineCoreOutputs([1], [0], [1], [5], [None], [None], [0], EngineStats()), now=11.0)
    assert (engine.sequences, engine.queued_tokens) == (3, 50)
    engine.end(1, now=14.0)
    engine.end(2, now=None)
    assert (engine.sequences, engine.queued_tokens, engine.open, engine.starting) == (0, 0, {}, {})
    assert engine.service_s == pytest.approx(1 + 3 / 8)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_prompt_is_known_by_the_same_keys_in_the_engine_and_outside(block_size: int) -> None:
    tokens = list(range(200))
    one, other = ChainedHasher(block_size), ChainedHasher(block_size)
    found: list[list[bytes]] = [[], []]
    for hasher, hashes in zip((one, other), found, strict=True):
        hasher.extend(hashes, hasher.root("digest", "salt"), tokens, 3)
    assert found[0] == found[1]
    assert keys_of(found[0]) == list(unpack_keys(pack_keys(found[0])))
    scopes = (None, "", "None", ("", None), ("one", None), ("one", ""), ("other", None), "('one', None)")
    assert len({one.root(digest, scope) for digest in ("", "a") for scope in scopes}) == 2 * len(scopes)


def test_what_an_open_request_stores_counts_until_it_is_told_or_the_request_is_over() -> None:
    engine = RoutedEngine(client=None)  # type: ignore[arg-type]
    engine.blocks.apply(changes(0))
    prompt = [int.from_bytes(bytes([name]) * 8, "little") for name in b"ab"]
    engine.begin(1, Route(engine, 1, 30, prompt, since=0.0))
    late = EngineCoreOutputs([1], [0], [1], [5], [None], [None], [0], EngineStats())
    engine.on_outputs(late, now=0.0)
    assert engine.blocks.num_matched(prompt) == 2, "the engine has not reported the stored blocks yet"
    assert engine.blocks.apply(changes(1, b"a" * 32))
    assert engine.blocks.apply(BlockChanges(2, b"", pack_keys([b"a" * 32])))
    assert engine.blocks.num_matched(prompt) == 0, "a reported removal has an effect at once"
    assert engine.blocks.num_matched(prompt[1:]) == 1
    engine.end(1, now=1.0)
    assert engine.blocks.num_matched(prompt[1:]) == 1, "the report is newer than the end"
    engine.on_outputs(replace(late, keys=[], created=0.9), now=1.1)
    assert engine.blocks.num_matched(prompt[1:]) == 1
    engine.on_outputs(replace(late, keys=[], created=1.0), now=3.0)
    assert engine.blocks.num_matched(prompt[1:]) == 0
    assert not engine.blocks._expected
    assert not engine.ended


def test_nothing_is_kept_of_a_served_request_that_stores_no_known_blocks() -> None:
    """With one engine no blocks are reported. An idle engine sends no message that would remove the entry later."""
    engine = RoutedEngine(client=None)  # type: ignore[arg-type]
    for key in range(3):
        engine.begin(key, Route(engine, 1, 30, since=0.0))
        engine.end(key, now=1.0)
    assert not engine.ended

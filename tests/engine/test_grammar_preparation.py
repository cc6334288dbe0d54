"""Grammars in the EngineCore with a fake worker: only their own requests wait for them, and aborts are noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raylm.config import CacheConfig, Config
from raylm.engine import EngineCore
from raylm.engine.grammar_preparation import MAX_KNOWN
from raylm.errors import InvalidRequestError
from raylm.messages import EngineCoreRequest, ServiceLevel
from tests.engine.build import request
from tests.engine.running_core import collect, running, until
from tests.fakes import FakeExecutor

CONFIG = Config(cache=CacheConfig(num_blocks=64))


class Compiling(FakeExecutor):
    """Compiles when the test sets ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.go = asyncio.Event()

    async def prepare_grammar(self, grammar: str) -> None:
        self.begun.append(grammar)
        await self.go.wait()
        await super().prepare_grammar(grammar)


def asking(key: int, grammar: str | None) -> EngineCoreRequest:
    made: EngineCoreRequest = request([1, 2, 3], key, max_tokens=3, ignore_eos=True)
    return replace(made, grammar=grammar)


async def test_free_requests_pass_one_whose_grammar_is_being_compiled() -> None:
    executor = Compiling()
    async with running(executor, CONFIG) as core:
        outbox = core.connect("client")
        await outbox.get()
        core.add("client", [asking(1, "slow"), asking(2, None), asking(3, "slow")])
        assert core.has_work
        assert set(await collect(outbox, 1)) == {(2, 0)}
        assert core.has_work
        assert not core.scheduler.has_work
        executor.go.set()
        assert set(await collect(outbox, 2)) == {(1, 0), (3, 0)}
        assert executor.begun == ["slow"]
        await until(lambda: not core.has_work)


async def test_a_grammar_is_compiled_again_only_when_it_may_be_forgotten() -> None:
    executor = Compiling()
    executor.go.set()
    async with running(executor, CONFIG) as core:
        outbox = core.connect("client")
        for key, grammar in enumerate(["a", "a", *(f"b{i}" for i in range(MAX_KNOWN)), "a"]):
            core.add("client", [asking(key, grammar)])
            await collect(outbox, 1)
    assert executor.begun.count("a") == 2


async def test_tenants_have_their_grammars_compiled_in_turn() -> None:
    """The many grammars of one tenant delay each grammar of another tenant by one."""
    executor = Compiling()
    async with running(executor, CONFIG) as core:
        outbox = core.connect("client")
        grammars = [("many", f"m{number}") for number in range(8)] + [("few", "a"), ("few", "b"), ("few", "m5")]
        for key, (tenant, grammar) in enumerate(grammars):
            core.add("client", [replace(asking(key, grammar), service=ServiceLevel(tenant))])
            if key == 0:
                await until(lambda: executor.begun)
        executor.go.set()
        await collect(outbox, len(grammars))
    assert executor.begun == ["m0", "m5", "m1", "a", "m2", "b", "m3", "m4", "m6", "m7"]


@pytest.mark.parametrize("ended", ["aborted", "left", "connected again"])
async def test_what_is_given_up_meanwhile_is_not_served(ended: str) -> None:
    executor = Compiling()
    async with running(executor, CONFIG) as core:
        core.connect("client")
        core.connect("other")
        core.add("client", [asking(1, "first"), asking(2, "second")])
        await until(lambda: executor.begun)
        if ended == "aborted":
            core.abort("client", [1, 2])
        elif ended == "left":
            core.drop_client("client")
        else:
            core.connect("client")
        assert not core.has_work
        other = core.connect("other")
        core.add("other", [asking(1, "third")])
        executor.go.set()
        assert set(await collect(other, 1)) == {(1, 0)}
        assert executor.begun == ["first", "third"]
        assert not core.has_work


async def test_a_grammar_that_fails_ends_its_requests_alone() -> None:
    executor = Compiling()
    executor.go.set()
    async with running(executor, CONFIG) as core:
        outbox = core.connect("client")
        await outbox.get()
        core.add("client", [asking(1, "bad"), asking(2, "bad"), asking(3, "good")])
        errors = []
        while len(errors) < 2:
            errors += (await outbox.get()).errors
        assert [key for key, _ in errors] == [1, 2]
        assert all(isinstance(error, InvalidRequestError) for _, error in errors)
        await until(lambda: not core.has_work)


async def test_an_engine_that_ends_lets_go_of_what_waits() -> None:
    executor = Compiling()
    core = EngineCore(CONFIG, executor)
    await core.start()
    core.connect("client")
    core.add("client", [asking(1, "slow")])
    await until(lambda: executor.begun)
    await core.shutdown()
    assert not core.has_work

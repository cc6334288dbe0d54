"""AdapterDirectory: the adapters that a replica knows, and the adapters that new engines get."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raylm.errors import EngineUnavailableError, InvalidRequestError, ModelNotFoundError, NotFoundError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.engines.router import Router
from raylm.frontend.prompt_state import process
from raylm.frontend.state.application_state import ApplicationState
from raylm.frontend.state.client import LocalState, StateClient
from raylm.messages import LoRAAdapter
from tests.engine.build import request
from tests.frontend.played_engine import PlayedEngine

ONE, TWO = LoRAAdapter("one", "path/one"), LoRAAdapter("two", "path/two")


def joined(directory: AdapterDirectory, *names: str) -> list[PlayedEngine]:
    engines = [PlayedEngine(name) for name in names]
    for engine in engines:
        directory.on_report(engine, ())
    return engines


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_adapter_is_loaded_into_every_engine_and_unloaded_from_every_one() -> None:
    directory = AdapterDirectory()
    engines = joined(directory, "a", "b")
    await directory.load(ONE)
    assert [engine.loaded for engine in engines] == [[ONE], [ONE]]
    assert directory.engines_with("one") == {"a", "b"}
    with pytest.raises(InvalidRequestError, match="'one' is loaded already"):
        await directory.load(LoRAAdapter("one", "else"))
    await directory.unload("one")
    assert [engine.loaded for engine in engines] == [[], []]
    with pytest.raises(NotFoundError, match="'one' is not loaded") as refused:
        await directory.unload("one")
    assert refused.value.param == "lora_name"


async def test_what_one_engine_refuses_is_in_none() -> None:
    directory = AdapterDirectory()
    engines = joined(directory, "a", "b")
    engines[1].refusal = InvalidRequestError("It cannot be served.", param="lora_path")
    with pytest.raises(InvalidRequestError, match="It cannot be served"):
        await directory.load(ONE)
    assert [engine.loaded for engine in engines] == [[], []]
    assert directory.known == {}


async def test_what_another_replica_loaded_is_learned_and_forgotten() -> None:
    directory = AdapterDirectory()
    a, b = joined(directory, "a", "b")
    directory.on_report(a, (ONE,))
    assert directory.engines_with("one") == {"a"}
    directory.on_report(b, (ONE, TWO))
    assert directory.known == {"one": ONE, "two": TWO}
    directory.on_report(a, ())
    assert directory.known == {"two": TWO}
    await settle()
    assert a.loaded == [], "only a new engine gets adapters"


async def test_an_engine_that_takes_the_place_of_a_lost_one_gets_its_adapters() -> None:
    directory = AdapterDirectory()
    (a,) = joined(directory, "a")
    await directory.load(ONE)
    directory.leave(a.info.engine_id)
    with pytest.raises(EngineUnavailableError, match="'one' is being loaded again"):
        directory.engines_with("one")
    (b,) = joined(directory, "b")
    await settle()
    assert b.loaded == [ONE]
    directory.on_report(b, (ONE,))
    assert directory.engines_with("one") == {"b"}


async def test_an_adapter_that_cannot_be_restored_is_lost_by_name() -> None:
    directory = AdapterDirectory()
    (a,) = joined(directory, "a")
    await directory.load(ONE)
    directory.leave(a.info.engine_id)
    b = PlayedEngine("b")
    b.refusal = InvalidRequestError("Its files are gone.", param="lora_path")
    directory.on_report(b, ())
    await settle()
    with pytest.raises(ModelNotFoundError, match="'one' was lost: Its files are gone"):
        directory.engines_with("one")
    b.refusal = None
    await directory.load(ONE)
    assert directory.engines_with("one") == {"b"}


async def test_nothing_is_loaded_without_an_engine() -> None:
    with pytest.raises(EngineUnavailableError):
        await AdapterDirectory().load(ONE)


async def test_a_request_goes_to_an_engine_that_has_its_adapter() -> None:
    router = Router(process)
    a, b = PlayedEngine("a"), PlayedEngine("b")
    for engine in (a, b):
        router.add(engine)
        engine.say(adapters=(TWO,) if engine is b else ())
    await settle()
    two, one = (replace(request([1]), adapter=name) for name in ("two", "one"))
    assert {router.pick(two).engine.client.info.engine_id for _ in range(8)} == {"b"}
    with pytest.raises(ModelNotFoundError):
        router.pick(one)
    b.die()
    await settle()
    with pytest.raises(EngineUnavailableError):
        router.pick(two)
    await router.close()


class LoadingEngine(PlayedEngine):
    """An engine that loads an adapter when the test allows it. A loading adapter cannot be unloaded yet."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id)
        self.may_load = asyncio.Event()

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        await self.may_load.wait()
        await super().load_adapter(adapter)


async def test_what_is_unloaded_while_an_engine_restores_it_stays_unloaded() -> None:
    directory = AdapterDirectory()
    (a,) = joined(directory, "a")
    await directory.load(ONE)
    b = LoadingEngine("b")
    directory.on_report(b, ())
    await settle()
    await directory.unload("one")
    b.may_load.set()
    await settle()
    assert b.loaded == [ONE]
    directory.on_report(b, (ONE,))
    assert directory.known == {}
    await settle()
    assert (a.loaded, b.loaded) == ([], [])
    directory.on_report(b, ())
    await directory.load(ONE)
    assert (a.loaded, b.loaded) == ([ONE], [ONE])
    directory.on_report(b, (ONE,))
    await settle()
    assert b.loaded == [ONE]


class Replica:
    """A directory, and its client of the application's state."""

    def __init__(self, state: ApplicationState, *engines: PlayedEngine) -> None:
        self.directory, self.client = AdapterDirectory(), StateClient(LocalState(state))
        self.client.share(bytes, self.directory)
        for engine in engines:
            self.directory.on_report(engine, tuple(engine.loaded))

    async def hear(self) -> None:
        await self.client.publish()
        await settle()


async def test_what_one_replica_unloads_another_does_not_restore() -> None:
    state, a = ApplicationState(), PlayedEngine("a")
    one, other = Replica(state, a), Replica(state, a)
    await one.directory.load(ONE)
    await other.hear()
    assert other.directory.known == {"one": ONE}
    b = LoadingEngine("b")
    other.directory.on_report(b, ())
    await settle()
    await one.directory.unload("one")
    b.may_load.set()
    await settle()
    other.directory.on_report(b, (ONE,))
    await other.hear()
    assert other.directory.known == {}
    assert (a.loaded, b.loaded) == ([], [])
    await one.client.close()
    await other.client.close()


async def test_adapters_are_known_when_ingresses_and_engines_start_anew_together() -> None:
    state = ApplicationState()
    before = Replica(state, PlayedEngine("a"))
    await before.directory.load(ONE)
    await before.directory.load(TWO)
    await before.directory.unload("two")
    await before.client.close()
    engine = PlayedEngine("b")
    after = Replica(state, engine)
    await after.hear()
    assert after.directory.known == {"one": ONE}
    assert engine.loaded == [ONE]
    await after.client.close()


async def test_a_state_that_is_lost_hears_of_adapters_from_replicas_and_engines() -> None:
    a = PlayedEngine("a")
    old, new = ApplicationState(), ApplicationState()
    one = Replica(old, a)
    await one.directory.load(ONE)
    await one.directory.load(TWO)
    await one.directory.unload("two")
    one.client._link = LocalState(new)
    await one.hear()
    other = Replica(new, PlayedEngine("b"))
    await other.hear()
    assert other.directory.known == {"one": ONE}
    alone = Replica(ApplicationState(), a)  # only the engine is older
    await alone.hear()
    assert alone.directory.known == {"one": ONE}
    for replica in (one, other, alone):
        await replica.client.close()


async def test_a_loading_that_another_replica_sees_half_done_is_not_undone_by_it() -> None:
    state, a, slow = ApplicationState(), PlayedEngine("a"), LoadingEngine("b")
    one, other = Replica(state, a, slow), Replica(state, a, slow)
    slow.may_load.set()
    await one.directory.load(ONE)
    await one.directory.unload("one")
    await other.hear()
    slow.may_load.clear()
    loading = asyncio.create_task(one.directory.load(ONE))
    await settle()
    other.directory.on_report(a, (ONE,))
    await other.hear()
    assert a.loaded == [ONE]
    slow.may_load.set()
    await loading
    other.directory.on_report(slow, (ONE,))
    await other.hear()
    assert other.directory.known == {"one": ONE}
    assert (a.loaded, slow.loaded) == ([ONE], [ONE])
    for replica in (one, other):
        await replica.client.close()

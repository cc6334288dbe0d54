"""OthersLoad: the expected load of other clients when an engine's report is old."""

from __future__ import annotations

import random
from itertools import chain
from math import exp

import pytest

from raylm.frontend.engines.others_load import OthersLoad, distances
from raylm.frontend.engines.routed_engine import Route, RoutedEngine
from raylm.frontend.engines.router import Router
from raylm.frontend.prompt_state import process
from raylm.messages import EngineCoreOutputs, EngineStats, OtherClients
from tests.engine.build import request
from tests.frontend.played_engine import PlayedEngine

SPEED = {"step_s": 0.01, "token_s": 0.0001}


def test_what_is_usual_is_the_mean_by_time_of_what_was_told() -> None:
    rng, load, now, mean = random.Random(1), OthersLoad(), 0.0, 0.0
    for _ in range(20_000):
        queued, lasted_s = rng.choice([0, 0, 3000]), rng.uniform(0.001, 0.1)
        load.tell(OtherClients(queued, queued // 1000), now)
        now += lasted_s
        mean = queued + (mean - queued) * exp(-lasted_s / 30)
    load.tell(OtherClients(), now)
    assert load.usual_tokens == pytest.approx(mean, rel=0.01)
    assert load.usual_sequences == pytest.approx(mean / 1000, rel=0.01)
    assert 700 < load.usual_tokens < 1300


def test_what_is_told_fades_into_what_is_usual() -> None:
    load = OthersLoad(usual_tokens=1000, usual_sequences=2)
    load.tell(OtherClients(4000, 8), 0.0)
    load.usual_tokens, load.usual_sequences = 1000, 2
    expected = []
    for now in (0.0, 0.5, 1.0, 9.0):
        queued_s = load.told_s(now, 1e-4) + load.unheard_s(load.doubt(now, service_s=1.0), 1e-4)
        expected.append((queued_s, load.sequences(now, service_s=1.0)))
    assert expected == [pytest.approx(pair) for pair in [(0.4, 8), (0.1, 5), (0.1, 2), (0.1, 2)]]


def test_who_was_never_told_of_others_has_none() -> None:
    load = OthersLoad()
    load.tell(OtherClients(), 1e9)
    assert not load.exist
    load.tell(OtherClients(0, 1), 1e9 + 1)
    assert load.exist
    load.tell(OtherClients(), 1e9 + 2)
    assert load.exist, "there was some load recently"
    load.tell(OtherClients(), 1e9 + 1000)
    assert not load.exist


def drawn(key: int, others: OtherClients, created: float = 0.0) -> EngineCoreOutputs:
    stats = EngineStats(running=2, places=62, others=others, step_s=SPEED["step_s"], token_s=SPEED["token_s"])
    return EngineCoreOutputs([key], [0], [1], [5], [None], [None], [0], stats, created=created)


def test_a_pause_between_own_tokens_shows_that_prompts_are_computed() -> None:
    engine = RoutedEngine(client=None)  # type: ignore[arg-type]

    def cost(now: float) -> float:
        return engine.predicted_s(1000, now=now, **SPEED)

    engine.begin(1, Route(engine, 1, 100, since=0.0))
    news, now = OtherClients(0, 4), 0.0
    for _ in range(20):  # its first token, then one token per step
        now += 0.011
        engine.on_outputs(drawn(1, news), now)
    engine.on_outputs(drawn(1, news), now := now + 0.2)  # a step with a prompt of another client
    assert engine.others.long_s == pytest.approx(0.2)
    assert cost(now + 0.01) - engine.others.long_s == pytest.approx(cost_without(engine, now + 0.01))
    engine.on_outputs(drawn(1, news), now := now + 0.011)
    short = cost(now + 0.01)
    assert short == pytest.approx(cost_without(engine, now + 0.01)), "the last step was short, so this one may be too"
    assert cost(now + 0.05) == pytest.approx(short + 0.2, abs=0.01)


def cost_without(engine: RoutedEngine, now: float) -> float:
    """The cost of the same engine without a long step."""
    long_s, engine.others.long_s = engine.others.long_s, 0.0
    found = engine.predicted_s(1000, now=now, **SPEED)
    engine.others.long_s = long_s
    return found


def test_a_wait_that_is_only_expected_counts_for_more_than_its_mean() -> None:
    """Except for reports that are too old, and for ingresses that meet on an engine."""
    engine = RoutedEngine(client=None)  # type: ignore[arg-type]
    half = 1 / 32  # the age, in seconds, at which the weight of a report is one half
    engine.on_outputs(EngineCoreOutputs(*([], [], [], [], [], [], []), EngineStats(others=OtherClients(0, 1))), 0.0)

    def wait_s(meeting: float, now: float = 9.0) -> float:
        engine.others.usual_tokens = 0.0
        idle = engine.predicted_s(1000, now=now, **SPEED, meeting=meeting, is_named=True)
        engine.others.usual_tokens = 500.0  # 50 ms
        return engine.predicted_s(1000, now=now, **SPEED, meeting=meeting, is_named=True) - idle

    assert wait_s(meeting=0.0, now=half) == pytest.approx(2 * 0.05 / 2)
    assert wait_s(meeting=1.0, now=half) == pytest.approx(1.5 * 0.05 / 2)
    assert wait_s(meeting=0.0) == wait_s(meeting=1.0) == pytest.approx(0.05)
    assert wait_s(meeting=0.0, now=0.0) == pytest.approx(0.0), "the report is new"


@pytest.mark.parametrize("ingresses", [2, 4, 8])
async def test_routers_prefer_different_engines_where_others_use_them(ingresses: int) -> None:
    """Even fresh reports do not contain the requests that another ingress sends at this moment."""
    preferred: dict[float, list[set[str]]] = {0.0: [], 2.0: []}
    for rank in range(ingresses):
        now = [100.0]
        router = Router(process, clock=lambda now=now: now[0], rank=rank)
        for name in "cabdhgfe":
            router.add(PlayedEngine(name, max_model_len=10_000))

        def picked(router: Router = router, rank: int = rank) -> set[str]:
            return {router.pick(request([rank] * 2000)).engine.client.info.engine_id for _ in range(100)}

        assert len(picked()) == 8, "no other client uses the engines"
        for engine in router._engines.values():
            engine.on_outputs(drawn(1, OtherClients(0, 1), created=100.0), 100.0)
        for age, found in preferred.items():
            now[0] = 100.0 + age
            found.append(picked())
        await router.close()
    for found in preferred.values():
        assert len(set().union(*found)) == sum(map(len, found)) == ingresses


def test_routers_that_are_a_power_of_two_share_engines_evenly() -> None:
    """Each router prefers its nearest engines, and shares none of them with another router."""
    for ingresses, engines in ((2, 8), (4, 8), (4, 16), (8, 64)):
        nearest = [distances(engines, rank) for rank in range(ingresses)]
        own = [sorted(range(engines), key=far.__getitem__)[: engines // ingresses] for far in nearest]
        assert sorted(chain(*own)) == list(range(engines))

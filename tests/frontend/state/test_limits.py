"""Key limits over several replicas: never exceeded, returned, and kept when a new state replaces a lost one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric

from raylm.errors import EngineUnavailableError, RateLimitError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.state import client as client_module
from raylm.frontend.state.application_state import LEASE_S, ApplicationState
from raylm.frontend.state.client import Hold, LocalState, StateClient, StateLostError
from raylm.frontend.state.ledger import Ledger
from raylm.frontend.state.messages import COUNTED_S, Claim, KeyLimits, KeyUsage, StateReply, StateReport


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SlowState(LocalState):
    """Runs other tasks in between, as an actor does. Reports count, but ``lost`` of them get no reply."""

    def __init__(self, state: ApplicationState) -> None:
        super().__init__(state)
        self.lost = 0

    async def exchange(self, report: StateReport) -> StateReply:
        await asyncio.sleep(0.001 * random.random())
        reply = await super().exchange(report)
        if self.lost:
            self.lost -= 1
            raise StateLostError("planted")
        return reply


@asynccontextmanager
async def replicas(count: int, state: ApplicationState) -> AsyncIterator[list[StateClient]]:
    clients = [StateClient(SlowState(state)) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


async def at_once(claims: Sequence[Callable[[], Awaitable[Hold]]]) -> tuple[list[Hold], list[RateLimitError]]:
    answers = await asyncio.gather(*(claim() for claim in claims), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimitError)]
    granted = [answer for answer in answers if isinstance(answer, Hold)]
    assert len(granted) + len(refused) == len(answers), answers
    return granted, refused


@pytest.mark.parametrize(
    ("limits", "tokens", "most"),
    [
        (KeyLimits(requests_per_minute=7), None, 7),
        (KeyLimits(concurrency=5), None, 5),
        (KeyLimits(tokens_per_minute=1000), 90, 11),
    ],
)
async def test_a_hundred_at_once_do_not_pass_a_limit(limits: KeyLimits, tokens: int | None, most: int) -> None:
    async with replicas(2, ApplicationState()) as clients:
        claims = [partial(clients[place % 2].claim, "alice", limits, tokens) for place in range(100)]
        granted, refused = await at_once(claims)
        assert len(granted) == most
        (name,) = [name for name in KeyLimits.__slots__ if getattr(limits, name) is not None]
        assert all(name in error.message and error.retry_after_s >= 1 for error in refused)
        assert all("alice" in error.message for error in refused)
        others, _ = await at_once([lambda: clients[1].claim("bob", limits, tokens)])
        assert len(others) == 1, "another key has its own limits"


async def test_what_was_not_served_is_given_back() -> None:
    limits = KeyLimits(tokens_per_minute=1000, concurrency=1)
    async with replicas(2, ApplicationState()) as (one, other):
        hold, seat = await one.claim("a", limits, 900), await one.claim("a", limits)
        with pytest.raises(RateLimitError):
            await other.claim("a", limits, 200)
        with pytest.raises(RateLimitError):
            await other.claim("a", limits)
        hold.end(100)
        hold.end(900)
        seat.end()
        await one.publish()  # all uses have been reported
        await other.claim("a", limits)
        await other.claim("a", limits, 900)
        standing = other.standing("a")
        assert standing is not None
        assert standing.remaining_tokens == 0
        with pytest.raises(RateLimitError):
            await one.claim("a", limits, 1)


async def test_who_gives_up_while_asking_holds_nothing() -> None:
    limits = KeyLimits(concurrency=1)
    async with replicas(1, ApplicationState()) as (client,):
        for turns in range(12):
            hold = client.claim("a", limits)
            task = asyncio.ensure_future(hold)
            for _ in range(turns):
                await asyncio.sleep(0.0003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            hold.end()
            await client.publish()
            await client.publish()
            (await client.claim("a", limits)).end()
            await client.publish()


async def test_a_state_that_takes_anothers_place_knows_what_was_granted() -> None:
    limits = KeyLimits(requests_per_minute=10, tokens_per_minute=1000, concurrency=5)
    async with replicas(2, ApplicationState()) as clients:
        one, other = clients
        seats = [await client.claim("a", limits) for client in (one, one, other)]
        tokens = await other.claim("a", limits, 500)
        (await one.claim("a", limits, 300)).end(200)
        seats[0].end()
        new = ApplicationState()
        for client in clients:
            client._link = SlowState(new)
            await client.publish()
        again = await one.claim("a", limits)
        standing = one.standing("a")
        assert standing is not None
        assert (standing.remaining_requests, standing.remaining_tokens) == (6, 300)
        granted, _ = await at_once([lambda: other.claim("a", limits) for _ in range(4)])
        assert len(granted) == 2, "3 of 5 places are in use"
        for hold in (again, tokens, *seats, *granted):
            hold.end()
        await one.publish()
        await other.publish()
        await other.claim("a", limits, 800)


async def test_a_new_state_grants_nothing_before_all_have_told_their_rows() -> None:
    limits = KeyLimits(requests_per_minute=9)
    async with replicas(2, ApplicationState()) as clients:
        for place in range(8):
            (await clients[place % 2].claim("a", limits)).end()
        new = ApplicationState(settle_s=0.3)
        for client in clients:
            client._link = SlowState(new)
        granted, _ = await at_once([partial(clients[place % 2].claim, "a", limits) for place in range(20)])
    assert len(granted) == 1


async def test_reports_that_are_lost_are_not_counted_twice() -> None:
    limits = KeyLimits(requests_per_minute=4, concurrency=4)
    link = SlowState(ApplicationState())
    client = StateClient(link)
    link.lost = 1
    holds = [await client.claim("a", limits)]
    link.lost = 2
    holds.append(await client.claim("a", limits))
    standing = client.standing("a")
    assert standing is not None
    assert standing.remaining_requests == 2
    link.lost = 1
    holds[0].end()
    await client.publish()
    granted, _ = await at_once([lambda: client.claim("a", limits) for _ in range(9)])
    assert len(granted) == 2
    await client.close()


async def test_what_fails_in_a_report_does_not_end_reporting() -> None:
    failures = [ZeroDivisionError("planted")]

    def series() -> tuple[Metric, ...]:
        if failures:
            raise failures.pop()
        return ()

    client = StateClient(LocalState(ApplicationState()))
    client.share(series, AdapterDirectory())
    (await client.claim("a", KeyLimits(concurrency=1))).end()
    assert not failures
    await client.close()


async def test_without_a_state_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CLAIM_TIMEOUT_S", 0.05)
    link = SlowState(ApplicationState())
    link.lost = 10**9
    client = StateClient(link)
    with pytest.raises(EngineUnavailableError, match="limits"):
        await client.claim("a", KeyLimits(concurrency=1))
    await client.close()


async def test_what_a_lost_replica_held_is_free_and_counts_as_served() -> None:
    clock, limits = Clock(), KeyLimits(tokens_per_minute=100, concurrency=1)
    state = ApplicationState(clock)

    def ask(replica: str, *tokens: int | None) -> list[str | None]:
        claims = tuple(Claim("a", limits, one) for one in tokens)
        reply = state.exchange(StateReport(replica, clock.now, claims=claims))
        assert reply.standings is not None
        return [standing.refused_by for standing in reply.standings]

    assert ask("x", None, 60) == [None, None]
    assert ask("y", None, 60) == ["concurrency", "tokens_per_minute"]
    clock.now += LEASE_S + 0.1
    assert ask("y", None, 60) == [None, "tokens_per_minute"]
    clock.now += COUNTED_S
    assert ask("y", 60) == [None]


def test_a_report_that_is_late_or_repeated_changes_nothing() -> None:
    clock, limits = Clock(), KeyLimits(requests_per_minute=3)
    state, claims = ApplicationState(clock), (Claim("a", KeyLimits(requests_per_minute=3)),)

    def remaining(report: StateReport) -> int | None:
        standings = state.exchange(report).standings
        return standings[0].remaining_requests if standings else None

    first = StateReport("x", 1.0, claims=claims)
    assert remaining(first) == remaining(first) == 2
    row = KeyUsage()
    row.take(claims[0], 1.0)
    second = StateReport("x", 2.0, state.incarnation, {"a": row}, claims=claims)
    assert remaining(second) == 1
    assert remaining(first) is None, "the report is older than the last one"
    assert remaining(StateReport("y", 0.0, claims=(Claim("a", limits),))) == 0


def test_what_was_told_to_others_holds_when_a_replica_and_the_state_are_lost() -> None:
    clock, limits = Clock(), KeyLimits(requests_per_minute=10)
    state = ApplicationState(clock)
    granted = state.exchange(StateReport("x", clock.now, claims=(Claim("a", limits),) * 10)).standings
    others = state.exchange(StateReport("y", clock.now)).others
    new = ApplicationState(clock)
    again = new.exchange(StateReport("y", clock.now, others=others, claims=(Claim("a", limits),) * 10)).standings
    assert granted is not None
    assert again is not None
    assert {standing.refused_by for standing in granted} == {None}
    assert {standing.refused_by for standing in again} == {"requests_per_minute"}


@settings(deadline=None)
@given(st.data())
def test_a_ledger_grants_whatever_fits(data: st.DataObject) -> None:
    """Compares with a list of all grants. Usage is counted in whole seconds, so it counts for 60 to 61 seconds."""
    limits = KeyLimits(requests_per_minute=4, tokens_per_minute=50, concurrency=3)
    ledger, rows, now = Ledger(), {name: KeyUsage() for name in "xy"}, 0.0
    begun: list[float] = []
    served: list[tuple[float, int]] = []
    held: list[tuple[str, int | None]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.5, 7.0, 31.0]))
        replica = data.draw(st.sampled_from("xy"))
        kind = data.draw(st.sampled_from(["request", "tokens", "end"]))
        if kind == "end":
            if held:
                replica, asked = held.pop(data.draw(st.integers(0, len(held) - 1)))
                used = data.draw(st.integers(0, asked)) if asked else 0
                rows[replica].give_back(asked, used, now)
                served.append((now, used))
                ledger.replace(replica, {"a": rows[replica]}, 0.0, whole=False)
            continue
        asked = data.draw(st.integers(1, 30)) if kind == "tokens" else None
        claim = Claim("a", limits, asked, begins=data.draw(st.booleans()))
        standing = ledger.claim(replica, claim, now)
        if asked is None:
            seats = sum(tokens is None for _, tokens in held)
            fits = seats < 3 and (not claim.begins or sum(floor(at) + COUNTED_S > now for at in begun) < 4)
        else:
            reserved = sum(tokens or 0 for _, tokens in held)
            fits = reserved + sum(n for at, n in served if floor(at) + COUNTED_S > now) + asked <= 50
            if not fits and not reserved:
                later = [now + standing.retry_after_s + more for more in (-0.01, 0.01)]
                answers = [deepcopy(ledger).claim(replica, claim, at).refused_by for at in later]
                assert answers == ["tokens_per_minute", None]
        assert (standing.refused_by is None) == fits
        if fits:
            rows[replica].take(claim, now)
            held.append((replica, asked))
            begun += [now] if asked is None and claim.begins else []

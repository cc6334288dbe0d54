"""Random runs of replicas and their state: no minute exceeds a limit, except for grants known only to the dead."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.errors import EngineUnavailableError, RateLimitError
from raylm.frontend.state.application_state import SETTLE_S, ApplicationState, Departed, Series
from raylm.frontend.state.client import Hold, StateClient, StateLostError
from raylm.frontend.state.messages import WINDOW_S, Claim, KeyLimits, StateReply, StateReport
from raylm.simulate import virtual_time

LATE_S = 3.0  # the largest delay of a report that is delivered twice


@dataclass(eq=False)
class Grant:
    """A grant of the state to a replica, with the time on the world's clock."""

    replica: str
    claim: Claim
    at: float


@dataclass
class Actor:
    """A state, and the grants that it knows."""

    state: ApplicationState
    knows: set[Grant] = field(default_factory=set)


class Link:
    """Behaves like an actor on another node: messages take time, are copied, and may be lost or delivered twice."""

    shared = True

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.knows: set[Grant] = set()
        self._world = world

    async def exchange(self, report: StateReport) -> StateReply:
        world, chance = self._world, self._world.chance
        await self._travel()
        report, actor = pickle.loads(pickle.dumps(report)), world.actor
        if actor is None:
            raise StateLostError("there is no state")
        if not report.incarnation:
            actor.knows |= self.knows
        reply = pickle.loads(pickle.dumps(actor.state.exchange(report)))
        fresh = self._granted(report.claims, reply)
        actor.knows |= fresh
        world.granted |= fresh
        known = set(actor.knows) if reply.standings is not None else set()
        if chance.random() < 0.04:
            world.start(self._again(report, actor, LATE_S * chance.random()))
        if chance.random() < 0.08:
            raise StateLostError("the reply is lost")
        await self._travel()
        self.knows |= known
        world.begun += [grant for grant in fresh if grant.claim.tokens is None]
        return reply

    async def _travel(self) -> None:
        await asyncio.sleep(0.02 * self._world.chance.random())
        if self.name not in self._world.replicas:
            await asyncio.Event().wait()  # the replica is dead, so it sends and receives nothing

    def _granted(self, claims: Iterable[Claim], reply: StateReply) -> set[Grant]:
        now = asyncio.get_running_loop().time()
        answers = zip(claims, reply.standings or (), strict=False)
        return {Grant(self.name, claim, now) for claim, standing in answers if standing.refused_by is None}

    async def _again(self, report: StateReport, actor: Actor, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self._world.actor is actor:
            actor.state.exchange(report)

    async def series(self) -> tuple[Series, Departed]:
        raise StateLostError("not asked for")

    async def leave(self, replica: str) -> None:
        """Not called, because all replicas are killed here."""


@dataclass
class Replica:
    client: StateClient
    link: Link
    open: set[Hold] = field(default_factory=set)


class World:
    """Replicas whose clocks differ by up to 5,000 s, a state that may be lost, and the times of all grants."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.limits = KeyLimits(chance.choice([5, 20, 60]), chance.choice([500, 3000]), chance.choice([2, 6]))
        self.replicas: dict[str, Replica] = {}
        self.actor: Actor | None = Actor(ApplicationState(self._now, SETTLE_S))
        self.begun: list[Grant] = []
        self.served: list[tuple[float, int]] = []
        self.forgotten: set[Grant] = set()
        self.refused = 0
        self.granted: set[Grant] = set()
        self._dead: list[StateClient] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add_replica(self) -> None:
        name, loop = f"r{self.chance.getrandbits(32)}", asyncio.get_running_loop()
        skew, link = self.chance.uniform(-5000, 5000), Link(self, name)
        client = StateClient(link, name, lambda: loop.time() + skew)
        client.start()
        self.replicas[name] = Replica(client, link)

    def kill_replica(self, name: str) -> None:
        """Kill a replica. Everything that was reserved for it counts as used."""
        replica = self.replicas.pop(name)
        self._dead.append(replica.client)
        self.served += [(self._now(), hold.claim.tokens) for hold in replica.open if hold.claim.tokens]
        self.note_forgotten()
        self.add_replica()

    async def lose_state(self, down_s: float) -> None:
        self.actor = None
        self.note_forgotten()
        await asyncio.sleep(down_s)
        self.actor = Actor(ApplicationState(self._now, SETTLE_S))

    def note_forgotten(self) -> None:
        """Do not count grants that neither the state nor a replica knows any more."""
        known = set().union(*(replica.link.knows for replica in self.replicas.values()))
        known |= self.actor.knows if self.actor is not None else set()
        self.forgotten |= self.granted - known

    async def ask(self, name: str) -> None:
        """A request that holds its grants for a while."""
        replica, chance = self.replicas[name], self.chance
        tokens = None if chance.random() < 0.5 else chance.randrange(1, 200)
        try:
            hold = await replica.client.claim("k", self.limits, tokens)
        except RateLimitError:
            self.refused += 1
            return
        except EngineUnavailableError:
            return
        if self.replicas.get(name) is not replica:
            return
        replica.open.add(hold)
        await asyncio.sleep(chance.expovariate(0.5))
        if self.replicas.get(name) is replica:
            served = chance.randrange(tokens + 1) if tokens else 0
            self.served.append((self._now(), served))
            hold.end(served)
            replica.open.remove(hold)

    def check_open(self) -> None:
        seats = sum(hold.claim.tokens is None for one in self.replicas.values() for hold in one.open)
        forgotten = sum(grant.claim.tokens is None for grant in self.forgotten)
        assert self.limits.concurrency is not None
        assert seats <= self.limits.concurrency + forgotten

    def check_minutes(self) -> None:
        begun = [(grant.at, 1) for grant in self.begun]
        requests = sum(grant.claim.tokens is None for grant in self.forgotten)
        tokens = sum(grant.claim.tokens or 0 for grant in self.forgotten)
        assert self.limits.requests_per_minute is not None
        assert self.limits.tokens_per_minute is not None
        assert _worst(begun) <= self.limits.requests_per_minute + requests
        assert _worst(self.served) <= self.limits.tokens_per_minute + tokens

    async def end(self) -> None:
        for client in (*self._dead, *(replica.client for replica in self.replicas.values())):
            await client.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _worst(counted: list[tuple[float, int]]) -> int:
    """The largest sum in any window of WINDOW_S."""
    return max((sum(n for at, n in counted if begin <= at < begin + WINDOW_S) for begin, _ in counted), default=0)


async def live(chance: random.Random, losses: tuple[str, ...], seconds: float = 200.0) -> World:
    world, loop = World(chance), asyncio.get_running_loop()
    for _ in range(3):
        world.add_replica()
    next_loss = loop.time() + chance.uniform(5, 30)
    while loop.time() < seconds:
        await asyncio.sleep(chance.expovariate(8))
        world.start(world.ask(chance.choice(list(world.replicas))))
        world.check_open()
        if losses and loop.time() > next_loss:
            next_loss = loop.time() + chance.uniform(5, 40)
            for loss in losses:
                if loss == "state" and world.actor is not None:
                    world.start(world.lose_state(chance.uniform(0.1, 3.0)))
                    await asyncio.sleep(0)
                elif loss == "replica":
                    world.kill_replica(chance.choice(list(world.replicas)))
                elif loss == "pause":
                    await asyncio.sleep(chance.uniform(0.0, 30.0))
    world.check_minutes()
    await world.end()
    return world


LOSSES = [(), ("replica",), ("state",), ("replica", "pause", "replica"), ("replica", "pause", "state"),
          ("state", "pause", "replica"), ("replica", "state"), ("state", "replica")]  # fmt: skip


@pytest.mark.parametrize("losses", LOSSES, ids="-".join)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_no_minute_above_a_limit(losses: tuple[str, ...], seed: int) -> None:
    world = virtual_time.run(live(random.Random(seed), losses))
    assert world.begun
    assert world.refused
    assert sum(served for _, served in world.served)
    if "state" not in losses:
        assert not world.forgotten

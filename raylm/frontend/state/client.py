"""StateClient: an ingress replica's one line to the application's state; it never stands in a token's way."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Protocol

from raylm.errors import EngineUnavailableError, RateLimitError
from raylm.frontend.state.application_state import ApplicationState
from raylm.frontend.state.ledger import WINDOW_S
from raylm.frontend.state.messages import (
    AdapterEntry,
    Claim,
    Holdings,
    KeyLimits,
    Settlement,
    Spent,
    Standing,
    StateReply,
    StateReport,
)
from raylm.frontend.state.series import merge
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

PERIOD_S = 1.0  # between reports that have nothing urgent to tell
CLAIM_TIMEOUT_S = 10.0
SERIES_TIMEOUT_S = 2.0
_RETRY_S = 0.2


class StateLostError(Exception):
    """The state did not answer; it may or may not have taken in what it was told."""


class StateLink(Protocol):
    """The state itself, wherever it is: all raise StateLostError where it cannot be asked.

    It is ``shared`` where other replicas may ask it for the series of this one.
    """

    shared: bool

    async def exchange(self, report: StateReport) -> StateReply: ...

    async def series(self) -> tuple[dict[str, bytes], list[bytes]]: ...

    async def leave(self, replica: str) -> None: ...


class LocalState:
    """The state of an application with one ingress replica, in that replica; it ends with it."""

    def __init__(self, state: ApplicationState | None = None) -> None:
        self.shared = state is not None
        self._state = state or ApplicationState()

    async def exchange(self, report: StateReport) -> StateReply:
        return self._state.exchange(report)

    async def series(self) -> tuple[dict[str, bytes], list[bytes]]:
        return self._state.series()

    async def leave(self, replica: str) -> None:
        self._state.leave(replica)


class SharedAdapters(Protocol):
    """Who decides about adapters in this replica, and hears what others have decided."""

    def entries(self) -> Iterable[AdapterEntry]: ...

    def merge(self, entries: Iterable[AdapterEntry]) -> None: ...

    def connect(self, publish: Callable[[], Awaitable[None]]) -> None: ...


class Hold:
    """A claim that was granted; ``end`` says how many tokens were served, and gives back the rest. Safe to repeat."""

    def __init__(self, client: StateClient, claim: Claim) -> None:
        self._client = client
        self._claim: Claim | None = claim

    def end(self, tokens: int = 0) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            self._client.settle(claim, tokens)


class StateClient:
    """Reports to the state in one call at a time, from one task: what comes up meanwhile makes the next report.

    So a hundred claims at once are one or two calls. Ray cancels what a cancelled request started, recursively; so a
    request only puts into this client's lists. All methods belong to one event loop.
    """

    def __init__(self, link: StateLink | None = None, replica: str = "") -> None:
        self.replica = replica or uuid.uuid4().hex
        self._link: StateLink = link or LocalState()
        self._own_series: Callable[[], bytes] = bytes
        self._shared = _Shared()
        self._incarnation = ""
        self._numbers = count(1)
        self._claims: dict[int, tuple[Claim, asyncio.Future[Standing]]] = {}
        self._held = _Held()
        self._standings: dict[str, Standing] = {}
        self._wake = asyncio.Event()
        self._told: asyncio.Future[None] | None = None  # by the next report
        self._series_told = -math.inf
        self._task: asyncio.Task[None] | None = None

    def share(self, series: Callable[[], bytes], adapters: SharedAdapters) -> None:
        """What this replica tells the others of itself, and what it hears of them."""
        self._own_series = series
        self._shared = _Shared(adapters)
        adapters.connect(self.publish)

    def start(self) -> None:
        """Begin to report; else the first claim does."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=Context())  # not as a part of a request

    async def close(self) -> None:
        """Leave in order, so that nobody waits for the end of this replica's lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(StateLostError):
            await self._link.leave(self.replica)

    async def claim(self, key: str, limits: KeyLimits, tokens: int | None = None) -> Hold:
        """Let one request in, or reserve so many tokens, before it is dispatched.

        Raises:
            RateLimitError: it does not fit into the limits of the key now.
            EngineUnavailableError: the state did not answer in time.
        """
        self.start()
        claim = Claim(next(self._numbers), key, limits, tokens)
        answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._claims[claim.number] = claim, answer
        self._wake.set()
        taken = False
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                standing = await answer
            taken = True
        except TimeoutError:
            message = "The limits of the API keys could not be asked for; try again shortly."
            raise EngineUnavailableError(message) from None
        finally:
            if not taken:
                answer.cancel()
                self.settle(claim, 0)  # if it was granted to a request that has just been given up
        if standing.refused_by is not None:
            raise RateLimitError(_refusal(claim, standing), retry_after_s=math.ceil(standing.retry_after_s))
        return Hold(self, claim)

    def settle(self, claim: Claim, tokens: int) -> None:
        """A claim has ended; one that was not granted is ignored."""
        if self._held.end(claim, tokens):
            self._wake.set()

    def standing(self, key: str) -> Standing | None:
        """Where a key stood when its last claim was answered."""
        return self._standings.get(key)

    async def series(self) -> bytes:
        """The metrics of all replicas; of this one alone where the state does not answer."""
        own = self._own_series()
        try:
            async with asyncio.timeout(SERIES_TIMEOUT_S):
                others, departed = await self._link.series()
        except (StateLostError, TimeoutError):
            others, departed = {}, []
        return await asyncio.to_thread(merge, own, self.replica, others, departed)

    async def series_for_all(self) -> bytes | None:
        """As ``series`` in one of the replicas, the first by its name; None in others, and without the state."""
        own = self._own_series()
        try:
            async with asyncio.timeout(SERIES_TIMEOUT_S):
                others, departed = await self._link.series()
        except (StateLostError, TimeoutError):
            return None
        if min(others, default=self.replica) < self.replica:
            return None
        return await asyncio.to_thread(merge, own, self.replica, others, departed)

    async def publish(self) -> None:
        """Tell now what was decided about adapters; returns when it is told, or after PERIOD_S without the state."""
        self.start()
        told = self._told = self._told or asyncio.get_running_loop().create_future()
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await asyncio.shield(told)

    async def _run(self) -> None:
        was_lost = False
        while True:
            self._wake.clear()
            told, self._told = self._told, None
            try:
                while not await self._exchange():
                    self._introduce()
            except Exception as error:  # whatever it fails with, it may be well the next time
                if not was_lost:
                    known = isinstance(error, StateLostError)
                    logger.warning(
                        "the application's state is asked again: %s", error, exc_info=not known, extra=about("state")
                    )
                was_lost, self._told = True, told or self._told
                self._introduce()  # it may or may not have taken in the last report
                await asyncio.sleep(_RETRY_S)
                continue
            was_lost = False
            if told is not None and not told.done():
                told.set_result(None)
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wake.wait()

    def _introduce(self) -> None:
        """Say everything in the next report."""
        self._incarnation, self._series_told = "", -math.inf
        self._shared.forget()

    async def _exchange(self) -> bool:
        """Whether the state has taken in what is new here."""
        self._claims = {number: one for number, one in self._claims.items() if not one[1].cancelled()}
        asked = [claim for claim, _ in self._claims.values()]
        now = time.monotonic()
        series = None
        if self._link.shared and now - self._series_told >= PERIOD_S:
            self._series_told, series = now, self._own_series()
        report = StateReport(
            self.replica,
            self._incarnation,
            holdings=None if self._incarnation else self._held.all(now),
            settlements=self._held.settlements(),
            claims=tuple(asked),
            series=series,
            adapters=self._shared.changed(),
            adapters_version=self._shared.version,
        )
        reply = await self._link.exchange(report)
        if reply.standings is None:
            return False
        self._incarnation = reply.incarnation
        for claim, standing in zip(asked, reply.standings, strict=True):
            self._answer(claim, standing)
        self._shared.exchanged(report, reply)
        return True

    def _answer(self, claim: Claim, standing: Standing) -> None:
        _, answer = self._claims.pop(claim.number)
        self._standings[claim.key] = standing
        if standing.refused_by is None:
            self._held.begin(claim)
        if answer.cancelled():
            self.settle(claim, 0)
        else:
            answer.set_result(standing)


class _Held:
    """What this replica holds and has spent: enough to tell a state that knows nothing of it."""

    def __init__(self) -> None:
        self._open: dict[int, Claim] = {}
        self._spent: deque[tuple[float, str, int | None]] = deque()  # when, by which key, tokens or a request
        self._ended: list[Settlement] = []

    def begin(self, claim: Claim) -> None:
        self._open[claim.number] = claim
        if claim.tokens is None:
            self._spent.append((time.monotonic(), claim.key, None))

    def end(self, claim: Claim, tokens: int) -> bool:
        if self._open.pop(claim.number, None) is None:
            return False
        if tokens:
            self._spent.append((time.monotonic(), claim.key, tokens))
        self._ended.append(Settlement(claim.number, claim.key, tokens))
        return True

    def all(self, now: float) -> Holdings:
        """As one: what has ended need not be settled any more."""
        self._ended.clear()
        self._forget(now)
        spent = tuple(Spent(key, now - at, tokens) for at, key, tokens in self._spent)
        return Holdings(tuple(self._open.values()), spent)

    def settlements(self) -> tuple[Settlement, ...]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        self._forget(time.monotonic())
        return tuple(ended)

    def _forget(self, now: float) -> None:
        while self._spent and self._spent[0][0] <= now - WINDOW_S:
            self._spent.popleft()


class _Shared:
    """What is told and heard of adapters: entries by their revisions."""

    def __init__(self, adapters: SharedAdapters | None = None) -> None:
        self.version = -1  # of all entries, as the state counts
        self._adapters = adapters
        self._told: dict[str, int] = {}

    def forget(self) -> None:
        self.version, self._told = -1, {}

    def changed(self) -> tuple[AdapterEntry, ...]:
        entries = self._adapters.entries() if self._adapters is not None else ()
        return tuple(entry for entry in entries if self._told.get(entry.name) != entry.revision)

    def exchanged(self, report: StateReport, reply: StateReply) -> None:
        self.version = reply.adapters_version
        self._told |= {entry.name: entry.revision for entry in (*report.adapters, *(reply.adapters or ()))}
        if reply.adapters is not None and self._adapters is not None:
            self._adapters.merge(reply.adapters)


def _refusal(claim: Claim, standing: Standing) -> str:
    limits, name = claim.limits, standing.refused_by
    asked = "" if claim.tokens is None else f"; this request may take {claim.tokens:,} tokens (prompt and answer), "
    asked += "" if claim.tokens is None else f"{standing.remaining_tokens:,} are left"
    limit = getattr(limits, str(name))
    return f"The API key '{claim.key}' has reached its limit '{name}' of {limit:,}{asked}; try again shortly."

"""StateClient: an ingress replica's connection to the application's state. Tokens never wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from contextvars import Context
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from raylm.errors import EngineUnavailableError, RateLimitError
from raylm.frontend.state.application_state import ApplicationState, Departed, Series
from raylm.frontend.state.messages import AdapterEntry, Claim, KeyLimits, KeyUsage, Standing, StateReply, StateReport
from raylm.frontend.state.series import merge
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

PERIOD_S = 1.0  # between reports that have nothing urgent to tell
CLAIM_TIMEOUT_S = 5.0
SERIES_TIMEOUT_S = 2.0
_RETRY_S = 0.2


class StateLostError(Exception):
    """The state did not answer. It may or may not have applied the report."""


class StateLink(Protocol):
    """Access to the state. All methods raise StateLostError if the state cannot be reached.

    ``shared`` is whether other replicas may ask the state for the series of this one.
    """

    shared: bool

    async def exchange(self, report: StateReport) -> StateReply: ...

    async def series(self) -> tuple[Series, Departed]: ...

    async def leave(self, replica: str) -> None: ...


class LocalState:
    """The state of an application with one ingress replica, in that replica's process."""

    def __init__(self, state: ApplicationState | None = None) -> None:
        self.shared = state is not None
        self._state = state or ApplicationState()

    async def exchange(self, report: StateReport) -> StateReply:
        return self._state.exchange(report)

    async def series(self) -> tuple[Series, Departed]:
        return self._state.series()

    async def leave(self, replica: str) -> None:
        self._state.leave(replica)


class SharedAdapters(Protocol):
    """Interface of the replica's AdapterDirectory: its decisions, and the decisions of other replicas."""

    def entries(self) -> Iterable[AdapterEntry]: ...

    def merge(self, entries: Iterable[AdapterEntry]) -> None: ...

    def connect(self, publish: Callable[[], Awaitable[None]]) -> None: ...


class Hold:
    """A claim, from the request for it. ``end`` reports the number of tokens served and returns the rest.

    ``await hold`` waits for the answer. As a context manager it is an account, which no token was served of.

    Raises:
        RateLimitError: the claim exceeds a limit of the key now.
        EngineUnavailableError: the state did not answer in time.
    """

    def __init__(self, client: StateClient, claim: Claim) -> None:
        self.claim = claim
        self.answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._client = client
        self._granted = False

    def __await__(self) -> Generator[Any, None, Hold]:
        return self._until_granted().__await__()

    async def _until_granted(self) -> Hold:
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                standing = await self.answer
        except TimeoutError:
            self.end()
            message = "The limits of the API key could not be checked; try again shortly."
            raise EngineUnavailableError(message) from None
        except BaseException:
            self.end()  # it may have been granted in the same turn of the event loop
            raise
        if standing.refused_by is not None:
            raise RateLimitError(_refusal(self.claim, standing), retry_after_s=math.ceil(standing.retry_after_s))
        return self

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def decide(self, standing: Standing) -> None:
        """Set the answer. A claim whose caller was cancelled is returned."""
        self._granted = standing.refused_by is None
        if self.answer.cancelled():
            self.end()
        else:
            self.answer.set_result(standing)

    def end(self, tokens: int = 0) -> None:
        """End the claim. Safe to repeat. Before the answer, it gives up the claim."""
        self.answer.cancel()
        granted, self._granted = self._granted, False
        if granted:
            self._client.give_back(self.claim, tokens)


class _Rows:
    """The usage of this replica, by key, and the latest known usage of other replicas."""

    def __init__(self) -> None:
        self.others: dict[str, dict[str, KeyUsage]] = {}  # by replica and key, times by this replica's clock
        self.version = -1  # newest version among ``others``
        self._own: defaultdict[str, KeyUsage] = defaultdict(KeyUsage)
        self._changed: set[str] = set()  # keys that changed since the last report

    def take(self, claim: Claim, now: float) -> None:
        self._own[claim.key].take(claim, now)
        self._changed.add(claim.key)

    def give_back(self, claim: Claim, served: int, now: float) -> None:
        self._own[claim.key].give_back(claim.tokens, served, now)
        self._changed.add(claim.key)

    def all(self, now: float) -> dict[str, KeyUsage]:
        return self.news(self._own.keys(), now)

    def news(self, keys: Iterable[str], now: float) -> dict[str, KeyUsage]:
        """The rows of these keys, and of keys that changed since the last call."""
        rows = {key: self._own[key] for key in self._changed.union(keys)}
        self._changed.clear()
        for key in [key for key, row in rows.items() if row.expire(now)]:
            del self._own[key]
        return rows

    def hear(self, reply: StateReply, now: float) -> None:
        self.version = reply.version
        for replica, rows in reply.others.items():
            self.others.setdefault(replica, {}).update({key: row.moved(now - reply.at) for key, row in rows.items()})

    def forget_others(self, now: float) -> None:
        """Remove rows that no longer count."""
        for replica, rows in list(self.others.items()):
            self.others[replica] = {key: row for key, row in rows.items() if not row.expire(now)}
            if not self.others[replica]:
                del self.others[replica]


class StateClient:
    """Reports to the state with one call at a time, from one task. Changes during a call form the next report.

    So a hundred concurrent claims need one or two calls. Ray cancels the calls of a cancelled task recursively; so a
    request's task only appends to lists of this client. All methods belong to one event loop.
    """

    def __init__(
        self, link: StateLink | None = None, replica: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replica = replica or uuid.uuid4().hex
        self._link: StateLink = link or LocalState()
        self._clock = clock
        self._own_series: Callable[[], Iterable[Metric]] = tuple
        self._adapters: SharedAdapters | None = None
        self._adapters_told: tuple[AdapterEntry, ...] = ()
        self._adapters_version = -1
        self._incarnation = ""  # of the state that knows this replica; "" makes the next report whole
        self._rows = _Rows()
        self._asked: list[Hold] = []
        self._standings: dict[str, Standing] = {}
        self._wake = asyncio.Event()
        self._told: asyncio.Future[None] | None = None  # set when the next report is answered
        self._series_told = -math.inf
        self._task: asyncio.Task[None] | None = None

    def share(self, series: Callable[[], Iterable[Metric]], adapters: SharedAdapters) -> None:
        """Set ``series``, the source of this replica's metrics, and the ``adapters`` to share."""
        self._own_series, self._adapters = series, adapters
        adapters.connect(self.publish)

    def start(self) -> None:
        """Start to report. Otherwise the first claim starts it."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=Context())  # an empty context: not part of a request

    async def close(self) -> None:
        """Leave, so that no replica waits for the end of this replica's lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(StateLostError):
            await self._link.leave(self.replica)

    def claim(self, key: str, limits: KeyLimits, tokens: int | None = None, *, begins: bool = True) -> Hold:
        """Claim the start of one request, or ``tokens`` tokens, before the request is dispatched.

        A request that another replica began is claimed with ``begins`` False. The Hold counts from now on. Give it an
        owner that ends it, then await it.
        """
        self.start()
        hold = Hold(self, Claim(key, limits, tokens, begins))
        self._asked.append(hold)
        self._wake.set()
        return hold

    def give_back(self, claim: Claim, served: int) -> None:
        """Return a granted claim, of which ``served`` tokens were served."""
        self._rows.give_back(claim, served, self._clock())
        self._wake.set()

    def standing(self, key: str) -> Standing | None:
        """The standing of a key at the answer to its last claim."""
        return self._standings.get(key)

    async def series(self) -> bytes:
        """The metrics of all replicas in Prometheus' format; only of this one if the state does not answer."""
        own = tuple(self._own_series())
        others, departed = await self._series_of_others() or ({}, [])
        return await asyncio.to_thread(lambda: generate_latest(merge(own, self.replica, others, departed)))

    async def series_for_all(self) -> tuple[Metric, ...] | None:
        """As ``series``, in the replica with the first name. None in other replicas, and without the state."""
        own = tuple(self._own_series())
        found = await self._series_of_others()
        if found is None or min(found[0], default=self.replica) < self.replica:
            return None
        return await asyncio.to_thread(lambda: tuple(merge(own, self.replica, *found).collect()))

    async def publish(self) -> None:
        """Report decisions about adapters now. Returns when the state has answered, or after PERIOD_S."""
        self.start()
        told = self._told = self._told or asyncio.get_running_loop().create_future()
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await asyncio.shield(told)

    async def _series_of_others(self) -> tuple[Series, Departed] | None:
        with suppress(StateLostError, TimeoutError):
            async with asyncio.timeout(SERIES_TIMEOUT_S):
                return await self._link.series()
        return None

    async def _run(self) -> None:
        was_lost = False
        while True:
            self._wake.clear()
            told, self._told = self._told, None
            try:
                taken_in, was_lost = await self._exchange(), False
            except Exception as error:  # any exception: the next report may succeed
                if not was_lost:
                    known = isinstance(error, StateLostError)
                    logger.warning(
                        "the application's state did not answer, trying again: %s",
                        error,
                        exc_info=not known,
                        extra=about("state"),
                    )
                taken_in, was_lost = False, True
            if not taken_in:
                self._incarnation, self._series_told = "", -math.inf
                self._told = told or self._told
                await asyncio.sleep(_RETRY_S)
                continue
            if told is not None and not told.done():
                told.set_result(None)
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wake.wait()

    async def _exchange(self) -> bool:
        """Send one report. Returns whether the state applied it and answered its claims."""
        self._asked = [hold for hold in self._asked if not hold.answer.cancelled()]
        asked, whole, now = tuple(self._asked), not self._incarnation, self._clock()
        series = None
        if self._link.shared and now - self._series_told >= PERIOD_S:
            self._series_told, series = now, tuple(self._own_series())
            self._rows.forget_others(now)
        entries = tuple(self._adapters.entries()) if self._adapters is not None else ()
        report = StateReport(
            self.replica,
            now,
            self._incarnation,
            rows=self._rows.all(now) if whole else self._rows.news({hold.claim.key for hold in asked}, now),
            others=self._rows.others if whole else {},
            version=self._rows.version,
            claims=tuple(hold.claim for hold in asked),
            series=series,
            adapters=entries if whole or entries != self._adapters_told else (),
            adapters_version=-1 if whole else self._adapters_version,
        )
        reply = await self._link.exchange(report)
        if reply.standings is None:
            return False
        self._incarnation = reply.incarnation
        self._asked = self._asked[len(asked) :]
        now = self._clock()
        for hold, standing in zip(asked, reply.standings, strict=True):
            self._standings[hold.claim.key] = standing
            if standing.refused_by is None:
                self._rows.take(hold.claim, now)
            hold.decide(standing)
        self._rows.hear(reply, now)
        self._adapters_told, self._adapters_version = entries, reply.adapters_version
        if reply.adapters is not None and self._adapters is not None:
            self._adapters.merge(reply.adapters)
        return True


def _refusal(claim: Claim, standing: Standing) -> str:
    limits, name = claim.limits, standing.refused_by
    asked = "" if claim.tokens is None else f"; this request may take {claim.tokens:,} tokens (prompt and answer), "
    asked += "" if claim.tokens is None else f"{standing.remaining_tokens:,} are left"
    limit = getattr(limits, str(name))
    return f"The API key '{claim.key}' has reached its limit '{name}' of {limit:,}{asked}; try again shortly."

"""ApplicationState: what all ingress replicas of an application agree on; no Ray, no clock of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from raylm.frontend.state.ledger import KeyLedger
from raylm.frontend.state.messages import AdapterEntry, Holdings, StateReply, StateReport
from raylm.frontend.state.series import fold

LEASE_S = 5.0  # a replica that has not reported for so long is gone
MOST_DEPARTED = 32  # whose series are kept apart


class ApplicationState:
    """Owns the ledgers of keys, the newest decision about each adapter, and what each replica's metrics were.

    It is never asked for a token, and what it knows is also known by those who told it: one that takes the place of a
    lost one is told again by each replica, as it introduces itself. Only the counters of replicas that had ended
    before are lost then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._heard = clock()  # from any replica
        self._replicas: dict[str, float] = {}  # when each has reported last
        self._ledgers: dict[str, KeyLedger] = {}
        self._adapters: dict[str, AdapterEntry] = {}
        self._adapters_version = 0
        self._series: dict[str, bytes] = {}
        self._departed: dict[str, bytes] = {}  # by replica, "" for those before them

    def exchange(self, report: StateReport) -> StateReply:
        """Take in a report and answer it; of one to another incarnation nothing is taken in."""
        now = self._heard = self._clock()
        self._end_leases(now)
        if report.holdings is not None:
            self._restore(report.replica, report.holdings, now)
        elif report.incarnation != self.incarnation or report.replica not in self._replicas:
            return StateReply(self.incarnation)
        self._replicas[report.replica] = now
        for settlement in report.settlements:
            self._ledger(settlement.key).settle(report.replica, settlement, now)
        standings = tuple(self._ledger(claim.key).claim(report.replica, claim, now) for claim in report.claims)
        if report.series is not None:
            self._series[report.replica] = report.series
        self._merge(report.adapters)
        known = report.adapters_version == self._adapters_version
        adapters = None if known else tuple(self._adapters.values())
        return StateReply(self.incarnation, standings, adapters, self._adapters_version)

    def leave(self, replica: str) -> None:
        """A replica has ended in order."""
        if replica in self._replicas:
            self._lose(replica, self._clock())

    def silent_s(self) -> float:
        """Seconds since any replica has reported."""
        return self._clock() - self._heard

    def series(self) -> tuple[dict[str, bytes], list[bytes]]:
        """The metrics of each replica as it told them last, and those of replicas that have ended."""
        self._end_leases(self._clock())
        return dict(self._series), list(self._departed.values())

    def _ledger(self, key: str) -> KeyLedger:
        return self._ledgers.setdefault(key, KeyLedger())

    def _restore(self, replica: str, holdings: Holdings, now: float) -> None:
        self._departed.pop(replica, None)
        for key in {claim.key for claim in holdings.claims} | {spent.key for spent in holdings.spent}:
            self._ledger(key)
        for key, ledger in self._ledgers.items():
            claims = [claim for claim in holdings.claims if claim.key == key]
            ledger.restore(replica, claims, [spent for spent in holdings.spent if spent.key == key], now)

    def _merge(self, entries: tuple[AdapterEntry, ...]) -> None:
        for entry in entries:
            known = self._adapters.get(entry.name)
            if known is None or known.revision < entry.revision:
                self._adapters[entry.name] = entry
                self._adapters_version += 1

    def _end_leases(self, now: float) -> None:
        for replica in [replica for replica, heard in self._replicas.items() if heard < now - LEASE_S]:
            self._lose(replica, now)

    def _lose(self, replica: str, now: float) -> None:
        del self._replicas[replica]
        for key, ledger in list(self._ledgers.items()):
            ledger.lose(replica, now)
            if ledger.is_empty(now):
                del self._ledgers[key]
        if (series := self._series.pop(replica, None)) is not None:
            self._departed[replica] = series
        if len(self._departed) > MOST_DEPARTED:
            self._departed = {"": fold(list(self._departed.values()))}

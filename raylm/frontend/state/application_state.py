"""ApplicationState: the state that all ingress replicas of an application share. Needs neither Ray nor real time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.core import Metric

from raylm.frontend.state.ledger import Ledger
from raylm.frontend.state.messages import AdapterEntry, StateReply, StateReport
from raylm.frontend.state.series import fold

LEASE_S = 5.0  # a replica without a report for this time is gone
SETTLE_S = 2.0  # by then each replica has sent its rows to a new state
MOST_DEPARTED = 32  # ended replicas whose series are kept separately
_NEVER = float("-inf")

Series = dict[str, tuple[Metric, ...]]
Departed = list[tuple[Metric, ...]]


@dataclass(slots=True)
class _Lease:
    heard: float  # by the state's clock
    at: float = _NEVER  # the replica's clock in its last report; _NEVER if only other replicas have reported it


class ApplicationState:
    """Owns the ledger of keys, the newest decision about each adapter, and the newest metrics of each replica.

    The replicas have the same information and send it to a new state that replaces a lost one. A new state grants no
    claims for ``settle_s`` seconds. Only the counters of replicas that had ended are lost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, settle_s: float = 0.0) -> None:
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._heard = clock()  # from any replica
        self._settled = self._heard + settle_s
        self._leases: dict[str, _Lease] = {}
        self._ledger = Ledger()
        self._adapters: dict[str, AdapterEntry] = {}
        self._adapters_version = 0
        self._series: Series = {}
        self._departed: Series = {}  # by replica, "" for the sum of older ones

    def exchange(self, report: StateReport) -> StateReply:
        """Apply a report and answer it. A report that is late, or for another incarnation, is not applied."""
        now = self._heard = self._clock()
        self._end_leases(now)
        replica, whole, lease = report.replica, not report.incarnation, self._leases.get(report.replica)
        is_late = lease is not None and report.at < lease.at
        if is_late or not (whole or (lease is not None and report.incarnation == self.incarnation)):
            return StateReply(self.incarnation, now)
        self._leases[replica] = _Lease(now, report.at)
        self._departed.pop(replica, None)
        self._take_in(report, now, whole=whole)
        standings = None
        if not report.claims or now >= self._settled:
            standings = tuple(self._ledger.claim(replica, claim, now) for claim in report.claims)
        others = self._ledger.others(replica, -1 if whole else report.version)
        adapters = None if report.adapters_version == self._adapters_version else tuple(self._adapters.values())
        return StateReply(
            self.incarnation, now, standings, others, self._ledger.version, adapters, self._adapters_version
        )

    def leave(self, replica: str) -> None:
        """Remove a replica that has shut down."""
        if replica in self._leases:
            self._lose(replica, self._clock())

    def silent_s(self) -> float:
        """Seconds since the last report of any replica."""
        return self._clock() - self._heard

    def series(self) -> tuple[Series, Departed]:
        """The latest metrics of each replica, and those of replicas that have ended."""
        self._end_leases(self._clock())
        return dict(self._series), list(self._departed.values())

    def _take_in(self, report: StateReport, now: float, *, whole: bool) -> None:
        ahead_s = now - report.at  # includes the delay of the report, so usage counts longer, never shorter
        self._ledger.version = max(self._ledger.version, report.version)
        self._ledger.replace(report.replica, report.rows, ahead_s, whole=whole)
        for other, rows in report.others.items():
            if self._leases.setdefault(other, _Lease(now)).at == _NEVER:
                self._ledger.hear(other, rows, ahead_s)
        if report.series is not None:
            self._series[report.replica] = report.series
        for entry in report.adapters:
            known = self._adapters.get(entry.name)
            if known is None or known.revision < entry.revision:
                self._adapters[entry.name] = entry
                self._adapters_version += 1

    def _end_leases(self, now: float) -> None:
        for replica in [replica for replica, lease in self._leases.items() if lease.heard < now - LEASE_S]:
            self._lose(replica, now)

    def _lose(self, replica: str, now: float) -> None:
        del self._leases[replica]
        self._ledger.end(replica, now)
        if (series := self._series.pop(replica, None)) is not None:
            self._departed[replica] = series
        if len(self._departed) > MOST_DEPARTED:
            self._departed = {"": fold(self._departed.values())}

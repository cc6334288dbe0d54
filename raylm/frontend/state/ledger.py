"""Ledger: the usage of API keys' limits in all replicas. Owned by the ApplicationState."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from raylm.frontend.state.messages import COUNTED_S, WINDOW_S, Claim, KeyUsage, LimitName, Standing

_RETRY_S = 1.0  # used if the end of the open claims is unknown


class Ledger:
    """Usage by key and replica. A claim is granted if it fits the limits together with all rows of its key.

    A request counts from its start. Tokens count from their claim until one minute after the end of the claim, so no
    minute exceeds a limit. ``now`` is a monotonic time in seconds.
    """

    def __init__(self) -> None:
        self.version = 0  # of the newest change
        self._rows: defaultdict[str, dict[str, KeyUsage]] = defaultdict(dict)

    def replace(self, replica: str, rows: Mapping[str, KeyUsage], ahead_s: float, *, whole: bool) -> None:
        """Store rows that a replica sent.

        Args:
            ahead_s: How many seconds the ledger's clock is ahead of the replica's clock.
            whole: Whether ``rows`` are all rows of the replica. Its other rows are removed.
        """
        if whole:
            for by_replica in self._rows.values():
                by_replica.pop(replica, None)
        for key, row in rows.items():
            self._rows[key][replica] = self._changed(row.moved(ahead_s))

    def hear(self, replica: str, rows: Mapping[str, KeyUsage], ahead_s: float) -> None:
        """Store rows of a replica that another replica sent. Only newer versions are stored."""
        for key, row in rows.items():
            known = self._rows[key].get(replica)
            if known is None or known.version < row.version:
                self._rows[key][replica] = row.moved(ahead_s)

    def end(self, replica: str, now: float) -> None:
        """Remove a replica. Its tokens count until their minute is over."""
        for key, by_replica in list(self._rows.items()):
            if (row := by_replica.get(replica)) is not None:
                row.end(now)
                self._changed(row)
            if not self._counting(key, now):
                del self._rows[key]

    def others(self, replica: str, since: int) -> dict[str, dict[str, KeyUsage]]:
        """The rows of other replicas changed after version ``since``, by replica and key."""
        found: dict[str, dict[str, KeyUsage]] = {}
        for key, by_replica in self._rows.items():
            for other, row in by_replica.items():
                if row.version > since and other != replica:
                    found.setdefault(other, {})[key] = row
        return found

    def claim(self, replica: str, claim: Claim, now: float) -> Standing:
        """Grant or refuse a claim. A refused claim changes nothing."""
        limits, rows = claim.limits, self._counting(claim.key, now)
        own, of_all = rows.setdefault(replica, KeyUsage()), rows.values()
        requests = _Taken(limits.requests_per_minute, [row.requests for row in of_all])
        tokens = _Taken(limits.tokens_per_minute, [row.tokens for row in of_all], sum(row.reserved for row in of_all))
        refused_by: LimitName | None = None
        if claim.tokens is not None:
            retry_after_s = tokens.wait_s(claim.tokens, now)
            refused_by = "tokens_per_minute" if retry_after_s else None
        elif limits.concurrency is not None and sum(row.open for row in of_all) >= limits.concurrency:
            refused_by, retry_after_s = "concurrency", _RETRY_S
        else:
            retry_after_s = requests.wait_s(1, now) if claim.begins else 0.0
            refused_by = "requests_per_minute" if retry_after_s else None
        if refused_by is None:
            own.take(claim, now)
            self._changed(own)
            if claim.tokens is None:
                requests.total += claim.begins
            else:
                tokens.total += claim.tokens
                tokens.held += claim.tokens
        left = requests.left(), tokens.left()
        return Standing(limits, refused_by, retry_after_s, *left, requests.reset_s(now), tokens.reset_s(now))

    def _changed(self, row: KeyUsage) -> KeyUsage:
        self.version += 1
        row.version = self.version
        return row

    def _counting(self, key: str, now: float) -> dict[str, KeyUsage]:
        """The rows of a key that still count."""
        rows = self._rows[key]
        for replica in [replica for replica, row in rows.items() if row.expire(now)]:
            del rows[replica]
        return rows


class _Taken:
    """The usage of one limit in all replicas: tokens counted by second, and claims that are not yet counted."""

    def __init__(self, most: int | None, counts: list[dict[float, int]], held: int = 0) -> None:
        self.total = held + sum([sum(one.values()) for one in counts]) if most is not None else 0
        self.held = held
        self._most, self._counts = most, counts

    def wait_s(self, number: int, now: float) -> float:
        """Seconds until ``number`` more fit, or 0. If an open claim must end first, _RETRY_S."""
        if self._most is None or (over := self.total + number - self._most) <= 0:
            return 0.0
        for second, counted in sorted(pair for one in self._counts for pair in one.items()):
            over -= counted
            if over <= 0:
                return second + COUNTED_S - now
        return _RETRY_S

    def left(self) -> int | None:
        return None if self._most is None else max(0, self._most - self.total)

    def reset_s(self, now: float) -> float | None:
        """Seconds until nothing counts any more, without new usage."""
        if self._most is None or self.held:
            return None if self._most is None else WINDOW_S
        return max((second + COUNTED_S - now for one in self._counts for second in one), default=0.0)

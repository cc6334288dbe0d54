"""KeyLedger: what one API key has taken of its limits, over all ingress replicas; owned by the ApplicationState."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from raylm.frontend.state.messages import Claim, KeyLimits, LimitName, Settlement, Spent, Standing

WINDOW_S = 60.0
_RETRY_S = 1.0  # where nothing says when what is open will end


@dataclass(slots=True)
class _Entry:
    """Counted at ``time``, for a replica: so many requests or tokens."""

    time: float
    replica: str
    amount: int


class _Window:
    """What was counted in the last WINDOW_S, in order of time."""

    def __init__(self) -> None:
        self.total = 0
        self._entries: deque[_Entry] = deque()

    def add(self, time: float, replica: str, amount: int) -> None:
        if amount:
            self.total += amount
            self._entries.append(_Entry(time, replica, amount))

    def expire(self, now: float) -> None:
        while self._entries and self._entries[0].time <= now - WINDOW_S:
            self.total -= self._entries.popleft().amount

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until so much of it does not count any more; _RETRY_S if there is not so much."""
        for entry in self._entries:
            amount -= entry.amount
            if amount <= 0:
                return entry.time + WINDOW_S - now
        return _RETRY_S

    def reset_s(self, now: float) -> float:
        return self._entries[-1].time + WINDOW_S - now if self._entries else 0.0

    def forget(self, replica: str) -> None:
        self._entries = deque(entry for entry in self._entries if entry.replica != replica)
        self.total = sum(entry.amount for entry in self._entries)

    def sort(self) -> None:
        self._entries = deque(sorted(self._entries, key=lambda entry: entry.time))


class KeyLedger:
    """Requests count when they begin; tokens from when they are claimed until a minute after their claim has ended.

    So in any minute no more is served than the limits say. ``now`` is in seconds, of one clock that never goes back.
    """

    def __init__(self) -> None:
        self._requests = _Window()
        self._tokens = _Window()
        self._open: dict[tuple[str, int], Claim] = {}
        self._num_open = 0  # requests
        self._reserved = 0  # tokens

    def claim(self, replica: str, claim: Claim, now: float) -> Standing:
        """Grant a claim, or refuse it, which changes nothing."""
        self._expire(now)
        refused_by, retry_after_s = self._fault(claim, now)
        if refused_by is None:
            self._hold(replica, claim)
            if claim.tokens is None:
                self._requests.add(now, replica, 1)
        return self._standing(claim.limits, now, refused_by, retry_after_s)

    def settle(self, replica: str, settlement: Settlement, now: float) -> None:
        """A claim has ended; one that is not known is ignored."""
        if self._release((replica, settlement.number)):
            self._tokens.add(now, replica, settlement.tokens)

    def restore(self, replica: str, claims: list[Claim], spent: list[Spent], now: float) -> None:
        """Take over what a replica says of itself, in place of what was known of it."""
        self.forget(replica)
        for claim in claims:
            self._hold(replica, claim)
        for one in spent:
            window, amount = (self._requests, 1) if one.tokens is None else (self._tokens, one.tokens)
            window.add(now - one.age_s, replica, amount)
        for window in (self._requests, self._tokens):
            window.sort()

    def lose(self, replica: str, now: float) -> None:
        """A replica is gone: its requests are over, and what they might have been served counts as served."""
        for key in [key for key in self._open if key[0] == replica]:
            self._tokens.add(now, replica, self._open[key].tokens or 0)
            self._release(key)

    def forget(self, replica: str) -> None:
        for key in [key for key in self._open if key[0] == replica]:
            self._release(key)
        self._requests.forget(replica)
        self._tokens.forget(replica)

    def is_empty(self, now: float) -> bool:
        self._expire(now)
        return not (self._open or self._requests.total or self._tokens.total)

    def _fault(self, claim: Claim, now: float) -> tuple[LimitName | None, float]:
        limits = claim.limits
        if claim.tokens is not None:
            most = limits.tokens_per_minute
            if most is not None and (over := self._tokens.total + self._reserved + claim.tokens - most) > 0:
                return "tokens_per_minute", self._tokens.wait_s(over, now)
            return None, 0.0
        if limits.concurrency is not None and self._num_open >= limits.concurrency:
            return "concurrency", _RETRY_S
        most = limits.requests_per_minute
        if most is not None and (over := self._requests.total + 1 - most) > 0:
            return "requests_per_minute", self._requests.wait_s(over, now)
        return None, 0.0

    def _hold(self, replica: str, claim: Claim) -> None:
        self._open[replica, claim.number] = claim
        self._num_open += claim.tokens is None
        self._reserved += claim.tokens or 0

    def _release(self, key: tuple[str, int]) -> bool:
        claim = self._open.pop(key, None)
        if claim is None:
            return False
        self._num_open -= claim.tokens is None
        self._reserved -= claim.tokens or 0
        return True

    def _expire(self, now: float) -> None:
        self._requests.expire(now)
        self._tokens.expire(now)

    def _standing(self, limits: KeyLimits, now: float, refused_by: LimitName | None, retry_after_s: float) -> Standing:
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        taken = self._tokens.total + self._reserved
        reset_tokens_s = WINDOW_S if self._reserved else self._tokens.reset_s(now)
        return Standing(
            limits,
            refused_by,
            retry_after_s,
            None if requests is None else max(0, requests - self._requests.total),
            None if tokens is None else max(0, tokens - taken),
            None if requests is None else self._requests.reset_s(now),
            None if tokens is None else reset_tokens_s,
        )

"""Leases end where nobody renews them, once."""

from __future__ import annotations

from itertools import takewhile

from raylm.engine.liveness.leases import PERIOD_S, RENEWAL_S, Leases


def test_a_lease_ends_within_two_seconds_of_its_last_renewal_but_outlasts_late_ones() -> None:
    leases = Leases()
    leases.renew("gone")
    periods = 1
    while leases.expired() != ["gone"]:
        periods += 1
        leases.renew("here")
    assert 3 * RENEWAL_S < periods * PERIOD_S <= 2 - RENEWAL_S + PERIOD_S
    assert leases.expired() == []


def test_who_renews_stays_and_who_has_left_is_not_missed() -> None:
    leases = Leases()
    leases.renew("left")
    for _ in range(100):
        leases.renew("here")
        leases.end("left")
        assert leases.expired() == []
    leases.end("unknown")
    ends = list(takewhile(lambda gone: not gone, (leases.expired() for _ in range(100))))
    assert 0 < len(ends) < 99

"""Followed streams of stored responses count for the key that follows them, and in the replica."""

from __future__ import annotations

import pytest

from raylm.errors import OverloadedError, RateLimitError
from raylm.frontend import ApiKey, KeyLimits
from raylm.ingress.responses.routes import Followers


def test_a_key_follows_as_many_streams_as_it_may_have_requests() -> None:
    followers, key = Followers(9), ApiKey("alice", limits=KeyLimits(concurrency=1))
    with followers.place("alice", key):
        with pytest.raises(RateLimitError, match="'concurrency'"), followers.place("alice", key):
            pass
        with followers.place("bob", ApiKey("bob")), followers.place("bob", ApiKey("bob")):
            pass
    with followers.place("alice", key):
        pass


def test_a_replica_has_places_for_so_many() -> None:
    followers = Followers(2)
    with (
        followers.place("", None),
        followers.place("", None),
        pytest.raises(OverloadedError),
        followers.place("alice", ApiKey("alice")),
    ):
        pass
    with followers.place("", None), followers.place("", None):
        pass
    assert not followers._open

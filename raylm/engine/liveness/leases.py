"""Leases: which clients of an EngineCore are still there; each of them renews its lease again and again."""

from __future__ import annotations

PERIOD_S = 0.2
RENEWAL_S = 0.4  # of a client that has nothing else to send
_PERIODS = 8  # 1.6 s, so that with the renewals before, nothing runs for 2 s after its client


class Leases:
    """Call ``expired`` each PERIOD_S. Time is counted in these calls: an engine that was stopped blames nobody.

    A client's lease begins when it first sends something.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # by client, in periods

    def renew(self, client_id: str) -> None:
        self._left[client_id] = _PERIODS

    def end(self, client_id: str) -> None:
        """The client has left in order; nothing happens if its lease has ended before."""
        self._left.pop(client_id, None)

    def expired(self) -> list[str]:
        """The clients whose leases have ended since the last call."""
        for client_id in self._left:
            self._left[client_id] -= 1
        gone = [client_id for client_id, left in self._left.items() if left <= 0]
        for client_id in gone:
            del self._left[client_id]
        return gone

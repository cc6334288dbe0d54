"""ClientLoads: the open work of an engine by client. The Scheduler keeps it up to date."""

from __future__ import annotations

from collections import Counter

from raylm.engine.sequence import Sequence, Status
from raylm.messages import OtherClients


class ClientLoads:
    """Counts open sequences and owed tokens by client.

    Owed tokens are known tokens that are not computed yet, without the one that every step computes. For a waiting
    sequence they are the number that its client expects to be computed; after its start, the number that is left. A
    decoding sequence owes none.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._owed: dict[int, int] = {}  # by sequence id; only sequences that owe tokens

    def enter(self, seq: Sequence) -> None:
        """Add a sequence that begins to wait."""
        client = seq.client_id
        self._sequences[client] += 1
        if (tokens := _expected(seq)) > 0:
            self._tokens[client] += tokens
            self._owed[seq.id] = tokens

    def owe(self, seq: Sequence, tokens: int) -> None:
        """Set the number of tokens that a sequence owes; a negative number counts as 0."""
        more = max(0, tokens) - self._owed.pop(seq.id, 0)
        self._tokens[seq.client_id] += more
        if tokens > 0:
            self._owed[seq.id] = tokens

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence that has ended."""
        client = seq.client_id
        self.owe(seq, 0)
        self._sequences[client] -= 1
        if not self._sequences[client]:
            del self._sequences[client], self._tokens[client]

    def others(self, client_id: str) -> OtherClients:
        """The open work for all clients except ``client_id``."""
        tokens, sequences = self._tokens, self._sequences
        return OtherClients(tokens.total() - tokens[client_id], sequences.total() - sequences[client_id])


def _expected(seq: Sequence) -> int:
    known = len(seq.token_ids) - 1
    if seq.status is Status.PREEMPTED:
        return known
    if seq.index > 0:
        return 0  # the first sequence of the request has computed the prompt
    expected = seq.state.request.uncached_tokens
    return known if expected is None else min(known, expected - 1)
